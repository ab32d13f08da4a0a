"""What this machine can run: libraries, GPU, and attention backends, precisions and kernels, each with a self-test.

For each one that cannot run, the reason is given.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import torch

from wan_core.cli.libraries import LIBRARIES, library, library_lines, line, python
from wan_core.config.compile_cache import cache_folder, why_not_kept
from wan_core.execution.report import GIB
from wan_core.models.text.tokenizer import why_too_old
from wan_core.ops.attention.protocol import Attention
from wan_core.ops.attention.registry import BACKENDS, auto_choice
from wan_core.ops.attention.sdpa import math_lse, math_reference
from wan_core.ops.cards import capability, has_fp8
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.gguf_blocks import FORMATS
from wan_core.ops.library import IMPORT_FAULTS
from wan_core.ops.quant import mx
from wan_core.ops.quant.linear import QuantLinear
from wan_core.ops.quant.mx import encode_mxfp8, encode_nvfp4
from wan_core.ops.quant.packed import FORMATS as PACKED_FORMATS
from wan_core.ops.quant.packed import MICROSCALED
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.ops.quant.transformer_engine import DelayedState
from wan_core.pipeline.card_choice import Choice, choice_lines, choices_on
from wan_core.pipeline.settings import choose_device
from wan_core.pipeline.sources import TINY

# Largest relative errors that a self-test accepts.
TOLERANCE = 0.01  # of an exact backend in bf16; measured: 0.002 to 0.004
ROUNDED = 0.10  # of a backend that rounds to FP8 or int8; measured on random data: 0.05 to 0.08
ROUNDED_FP4 = 0.20  # of an NVFP4 matmul; the reference arithmetic gives 0.13 on random data
LINEAR = 0.04  # of an FP8 linear, for all kinds of scales; measured on random data: 0.037, most of it rounding
ERRORS = {"error": "relative error", "lse_error": "log-sum-exp error"}
HEAD_DIM = 128  # of every Wan 2.2 model
WIDTH = 256  # rows and columns of the matrix that tests an FP8 linear: two blocks of 128


def examine(device: str = "auto") -> dict[str, Any]:
    """All findings as plain data: {"system", "libraries", "card", "attention", "auto", "precisions", "packed",
    "kernels", "video", "compile cache", "embedded model"}. Raises OptionError for a device that does not exist."""
    resolved = choose_device(device)
    return {
        "system": _system(resolved),
        "libraries": _libraries(),
        "attention": {name: attention_state(name, resolved) for name in BACKENDS},
        # None where there is no NVIDIA GPU
        "card": {one.what: {"value": one.value, "why": one.why} for one in choices_on(resolved)} or None,
        "auto": auto_choice(capability(resolved), _dtype(resolved), HEAD_DIM),
        "precisions": {name: _precision(name, resolved) for name in SCHEMES},
        "packed": {
            "formats": list(PACKED_FORMATS),
            "products": {name: _packed_matmul(name, resolved) for name in MICROSCALED},
        },
        "kernels": _tested(fused.why_not(resolved), {"error": lambda: kernel_self_test(resolved)}, TOLERANCE, resolved),
        "video": _video(),
        "compile cache": {"folder": str(cache_folder()), "why_not": why_not_kept()},
        "embedded model": _assets(),
    }


def _system(device: torch.device) -> dict[str, Any]:
    system = python() | {"device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        system |= {
            "gpu": properties.name,
            "memory_gib": round(properties.total_memory / GIB, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "fp8": has_fp8(device),
        }
    return system


def _libraries() -> dict[str, dict[str, Any]]:
    libraries = {name: library(name) for name in LIBRARIES}
    tokenizer = libraries["sentencepiece"]
    too_old = tokenizer["version"] and why_too_old(tokenizer["version"])
    return libraries | {"sentencepiece": tokenizer | {"note": too_old or tokenizer["note"]}}


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def attention_state(name: str, device: torch.device) -> dict[str, Any]:
    """{"summary", "usable", "why_not", "error", "lse_error"}; "lse_error" is None for a backend without one."""
    backend = BACKENDS[name]
    tests = {
        "error": lambda: self_test(backend.load(), device),
        "lse_error": lambda: lse_self_test(backend.load(), device) if backend.gives_lse else None,
    }
    reason, allowed = backend.why_not(device, _dtype(device), HEAD_DIM), TOLERANCE if backend.exact else ROUNDED
    return {"summary": backend.summary} | _tested(reason, tests, allowed, device)


def _precision(name: str, device: torch.device) -> dict[str, Any]:
    scheme = SCHEMES[name]
    test = {"error": lambda: linear_self_test(scheme.linear, device)}
    return {"summary": scheme.summary} | _tested(scheme.why_not(device), test, LINEAR, device)


def _packed_matmul(name: str, device: torch.device) -> dict[str, Any]:
    """Whether matmuls read weights of this format directly; otherwise they are dequantised for each matmul."""
    return _tested(mx.why_not_multiply(device), {"error": lambda: packed_self_test(name, device)}, ROUNDED_FP4, device)


def _tested(
    reason: str | None, tests: Mapping[str, Callable[[], float | None]], allowed: float, device: torch.device
) -> dict[str, Any]:
    """{"usable", "why_not"} and, where nothing is known to be in the way (`reason`), the errors that `tests` measure.
    Not usable if a test raises or its error exceeds `allowed`."""
    state: dict[str, Any] = {"usable": reason is None, "why_not": reason}
    for key, test in tests.items() if reason is None else ():
        try:
            error = state[key] = test()
        except _kernel_faults(device) as fault:  # a broken library is a finding, not an error of the doctor
            reason = (str(fault).splitlines() or [type(fault).__name__])[0]
            return state | {"usable": False, "why_not": f"self-test failed: {reason}"}
        if error is not None and not error <= allowed:  # not `>`: NaN must fail
            reason = f"self-test failed: {ERRORS[key]} {error:.3g}, allowed {allowed}"
            state |= {"usable": False, "why_not": reason}
    return state


def _kernel_faults(device: torch.device) -> tuple[type[Exception], ...]:
    """Exceptions of kernels that cannot run here. Triton compiles at the first call and needs a C compiler."""
    if fused.why_not(device) is not None:
        return IMPORT_FAULTS
    from triton.errors import TritonError  # pyright: ignore[reportMissingImports]

    return (*IMPORT_FAULTS, subprocess.SubprocessError, TritonError)


def _random(device: torch.device, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def _relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.float() - expected).norm() / expected.norm())


def _qkv(device: torch.device) -> list[torch.Tensor]:
    """q, k and v of odd length at head dim 128."""
    return [x.to(_dtype(device)) for x in _random(device, *((1, length, 3, HEAD_DIM) for length in (333, 201, 201)))]


def self_test(attend: Attention, device: torch.device) -> float:
    """Relative error of a backend against the reference in float32."""
    q, k, v = _qkv(device)
    return _relative(attend(q, k, v), math_reference(q.float(), k.float(), v.float()))


def lse_self_test(attend: Attention, device: torch.device) -> float:
    """Largest absolute error of a backend's log-sum-exp against the reference, on keys whose mean is not zero."""
    q, k, v = _qkv(device)
    k = k + 1
    expected = math_lse(q.float(), k.float(), v.float())[1]
    return float((attend.with_lse(q, k, v)[1] - expected).abs().max())


@torch.no_grad()
def linear_self_test(kind: type[QuantLinear], device: torch.device) -> float:
    """Relative error of a quantised linear against float32. The second of two forwards is measured, because delayed
    scales are calibrated by the first."""
    x, weight = _random(device, (WIDTH, WIDTH), (WIDTH, WIDTH))
    linear = kind(WIDTH, WIDTH, bias=False, dtype=_dtype(device))
    linear.load(kind.encode(weight))
    state = DelayedState.install(linear, device)  # None for linears without delayed scales
    for _ in range(2):
        out = linear(x.to(_dtype(device)))
        if state is not None:
            state.update()
    return _relative(out, x @ weight.t())


@torch.no_grad()
def packed_self_test(name: str, device: torch.device) -> float:
    """Relative error of a matmul with packed weights against float32. The 77 rows need padding."""
    x, weight = _random(device, (77, WIDTH), (WIDTH, WIDTH))
    encoded = encode_mxfp8(weight) if name == "mxfp8" else encode_nvfp4(weight)
    parts: dict[str, torch.Tensor] = dict(zip(("weight", "weight_scale", "weight_scale_2"), encoded, strict=False))
    return _relative(mx.multiply(x.to(_dtype(device)), name, parts, None), x @ weight.t())


@torch.no_grad()
def kernel_self_test(device: torch.device) -> float:
    """Relative error of one fused kernel against torch in float32. If it compiles, the others do as well."""
    x, mul, add = _random(device, (1, 77, WIDTH), (1, 1, WIDTH), (1, 1, WIDTH))
    x = x.bfloat16()
    out = fused.norm(x, mul, add, 1e-6)
    assert isinstance(out, torch.Tensor)
    return _relative(out, torch.nn.functional.layer_norm(x.float(), (WIDTH,), eps=1e-6) * mul + add)


def _video() -> dict[str, Any]:
    try:
        from av.codec import codecs_available
    except ImportError as fault:
        return {"h264": False, "why_not": f"PyAV cannot be imported ({fault}): pip install av"}
    if "libx264" not in codecs_available:
        return {"h264": False, "why_not": "this build of PyAV has no libx264: pip install --force-reinstall av"}
    return {"h264": True, "why_not": None}


def _assets() -> dict[str, Any]:
    files = sorted(TINY.glob("*.safetensors"))
    return {"files": [f.name for f in files], "megabytes": round(sum(f.stat().st_size for f in files) / 1e6, 2)}


def text(findings: dict[str, Any]) -> str:
    lines = library_lines(findings)
    if findings["card"] is not None:
        lines += choice_lines([Choice(what, **one) for what, one in findings["card"].items()])
    lines.append(f"attention backends (auto: {findings['auto']})")
    lines += [line(name, _state(backend)) for name, backend in findings["attention"].items()]
    lines += ["precisions", *(line(name, _state(precision)) for name, precision in findings["precisions"].items())]
    lines += ["packed weights", line("GGUF", f"usable  [{', '.join(FORMATS)}]")]
    for name, matmul in findings["packed"]["products"].items():
        lines.append(line(name, f"usable, dequantised for each matmul; direct matmul: {packed_state(matmul)}"))
    kernels, video = findings["kernels"], findings["video"]
    cache, assets = findings["compile cache"], findings["embedded model"]
    ends = {
        "fused kernels": _state(kernels) + ("" if kernels["usable"] else f"; {fused.WITHOUT}"),
        "video": "H.264 through PyAV" if video["h264"] else video["why_not"],
        "compile cache": cache["folder"] if cache["why_not"] is None else f"not used: {cache['why_not']}",
        "embedded model": f"{len(assets['files'])} files, {assets['megabytes']} MB",
    }
    return "\n".join([*lines, *(f"{name:<24} {state}" for name, state in ends.items())])


def packed_state(matmul: Mapping[str, Any]) -> str:
    return (
        f"self-test error {matmul['error']:.1e}, else untested on hardware" if matmul["usable"] else matmul["why_not"]
    )


def _state(part: Mapping[str, Any]) -> str:
    state = f"usable, self-test error {part['error']:.1e}" if part["usable"] else f"not usable: {part['why_not']}"
    if part["usable"] and part.get("lse_error") is not None:
        state += f", log-sum-exp {part['lse_error']:.1e}"
    return state + (f"  [{part['summary']}]" if "summary" in part else "")

"""What this machine can run: libraries, GPU, and attention backends, precisions and kernels, each with a self-test.

For each one that cannot run, the reason is given.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from wan_core.cli.libraries import LIBRARIES, library, library_lines
from wan_core.config.compile_cache import why_not_kept
from wan_core.config.folders import cache_folder
from wan_core.execution.report import GIB
from wan_core.models.text.tokenizer import why_too_old
from wan_core.ops.attention.library import IMPORT_FAULTS
from wan_core.ops.attention.protocol import Attention
from wan_core.ops.attention.registry import BACKENDS, auto_choice
from wan_core.ops.attention.sdpa import math_lse, math_reference
from wan_core.ops.cards import capability, has_fp8
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.gguf_blocks import FORMATS
from wan_core.ops.kernels.microscaling import encode_mxfp8, encode_nvfp4
from wan_core.ops.quant import mx
from wan_core.ops.quant.linear import QuantLinear
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
HEAD_DIM = 128  # of every Wan 2.2 model
WIDTH = 256  # rows and columns of the matrix that tests an FP8 linear: two blocks of 128


def examine(device: str = "auto") -> dict[str, Any]:
    """All findings as plain data: {"system", "libraries", "card", "attention", "auto", "precisions", "packed",
    "kernels", "video", "compile cache", "embedded model"}. Raises OptionError for a device that does not exist."""
    resolved = choose_device(device)
    return {
        "system": _system(resolved),
        "libraries": {name: _library(name) for name in LIBRARIES},
        "attention": {name: _backend(name, resolved) for name in BACKENDS},
        "card": _card(resolved),
        "auto": auto_choice(capability(resolved), _dtype(resolved), HEAD_DIM),
        "precisions": {name: _precision(name, resolved) for name in SCHEMES},
        "packed": {
            "formats": list(PACKED_FORMATS),
            "products": {name: _packed_matmul(name, resolved) for name in MICROSCALED},
        },
        "kernels": _kernels(resolved),
        "video": _video(),
        "compile cache": {"folder": str(cache_folder()), "why_not": why_not_kept()},
        "embedded model": _assets(),
    }


def _system(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "memory_gib": round(properties.total_memory / GIB, 1),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "fp8": has_fp8(device),
        }
    return found


def _card(device: torch.device) -> dict[str, Any] | None:
    """The choices of `card_choices` for this card; None where there is no NVIDIA GPU."""
    choices = choices_on(device)
    return {one.what: {"value": one.value, "why": one.why} for one in choices} if choices else None


def _library(name: str) -> dict[str, Any]:
    found = library(name)
    too_old = name == "sentencepiece" and found["version"] and why_too_old(found["version"])
    return found | {"note": too_old or found["note"]}


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _backend(name: str, device: torch.device) -> dict[str, Any]:
    backend = BACKENDS[name]
    reason = backend.why_not(device, _dtype(device), HEAD_DIM)
    found: dict[str, Any] = {"summary": backend.summary, "usable": reason is None, "why_not": reason}
    if reason is not None:
        return found
    try:
        attend = backend.load()
        found["error"] = self_test(attend, device)
        found["lse_error"] = lse_self_test(attend, device) if backend.gives_lse else None
    except _kernel_faults(device) as fault:  # a broken library is a finding, not an error of the doctor
        return found | {"usable": False, "why_not": _failure(fault)}
    allowed = TOLERANCE if backend.exact else ROUNDED
    for name, error in (("relative error", found["error"]), ("log-sum-exp error", found["lse_error"])):
        if error is not None and not error <= allowed:  # not `>`: NaN must fail
            found |= {"usable": False, "why_not": f"self-test failed: {name} {error:.3g}, allowed {allowed}"}
    return found


def self_test(attend: Attention, device: torch.device) -> float:
    """Relative error of a backend against the reference in float32, on random data of odd length at head dim 128."""
    q, k, v = _random(device)
    expected = math_reference(q.float(), k.float(), v.float())
    return float((attend(q, k, v).float() - expected).norm() / expected.norm())


def lse_self_test(attend: Attention, device: torch.device) -> float:
    """Largest absolute error of a backend's log-sum-exp against the reference, on keys whose mean is not zero."""
    q, k, v = _random(device)
    k = k + 1
    expected = math_lse(q.float(), k.float(), v.float())[1]
    return float((attend.with_lse(q, k, v)[1] - expected).abs().max())


def _random(device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, length, 3, HEAD_DIM) for length in (333, 201, 201)]
    return [torch.randn(shape, generator=generator).to(device, _dtype(device)) for shape in shapes]


def _precision(name: str, device: torch.device) -> dict[str, Any]:
    scheme = SCHEMES[name]
    reason = scheme.why_not(device)
    found = {"summary": scheme.summary, "usable": reason is None, "why_not": reason}
    return _tested(found, lambda: linear_self_test(scheme.load(), device), LINEAR, device)


def _packed_matmul(name: str, device: torch.device) -> dict[str, Any]:
    """Whether matmuls read weights of this format directly; otherwise they are dequantised for each matmul."""
    reason = mx.why_not_multiply(device)
    found = {"usable": reason is None, "why_not": reason}
    return _tested(found, lambda: packed_self_test(name, device), ROUNDED_FP4, device)


def _kernels(device: torch.device) -> dict[str, Any]:
    reason = fused.why_not(device)
    return _tested({"usable": reason is None, "why_not": reason}, lambda: kernel_self_test(device), TOLERANCE, device)


def _tested(found: dict[str, Any], test: Callable[[], float], allowed: float, device: torch.device) -> dict[str, Any]:
    """`found` with the error that `test` measures; not usable if the test raises or its error exceeds `allowed`."""
    if not found["usable"]:
        return found
    try:
        error = test()
    except _kernel_faults(device) as fault:
        return found | {"usable": False, "why_not": _failure(fault)}
    if not error <= allowed:
        reason = f"self-test failed: relative error {error:.3g}, allowed {allowed}"
        found = found | {"usable": False, "why_not": reason}
    return found | {"error": error}


def _kernel_faults(device: torch.device) -> tuple[type[Exception], ...]:
    """Exceptions of kernels that cannot run here. Triton compiles at the first call and needs a C compiler."""
    if fused.why_not(device) is not None:
        return IMPORT_FAULTS
    from triton.errors import TritonError  # pyright: ignore[reportMissingImports]

    return (*IMPORT_FAULTS, subprocess.SubprocessError, TritonError)


@torch.no_grad()
def linear_self_test(kind: type[QuantLinear], device: torch.device) -> float:
    """Relative error of a quantised linear against float32, on random data. The second of two forwards is measured,
    because delayed scales are calibrated by the first."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(WIDTH, WIDTH, generator=generator).to(device) for _ in range(2))
    linear = kind(WIDTH, WIDTH, bias=False, dtype=_dtype(device))
    linear.load(kind.encode(weight))
    state = DelayedState.install(linear, device)  # None for linears without delayed scales
    for _ in range(2):
        out = linear(x.to(_dtype(device)))
        if state is not None:
            state.update()
    expected = x @ weight.t()
    return float((out.float() - expected).norm() / expected.norm())


@torch.no_grad()
def packed_self_test(name: str, device: torch.device) -> float:
    """Relative error of a matmul with packed weights against float32, on random data. The 77 rows need padding."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, WIDTH, generator=generator).to(device) for rows in (77, WIDTH))
    encoded = encode_mxfp8(weight) if name == "mxfp8" else encode_nvfp4(weight)
    parts: dict[str, torch.Tensor] = dict(zip(("weight", "weight_scale", "weight_scale_2"), encoded, strict=False))
    out = mx.multiply(x.to(_dtype(device)), name, parts, None)
    expected = x @ weight.t()
    return float((out.float() - expected).norm() / expected.norm())


@torch.no_grad()
def kernel_self_test(device: torch.device) -> float:
    """Relative error of one fused kernel against torch in float32. If it compiles, the others do as well."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 77, WIDTH, generator=generator).to(device, torch.bfloat16)
    mul, add = (torch.randn(1, 1, WIDTH, generator=generator).to(device) for _ in range(2))
    out = fused.norm(x, mul, add, 1e-6)
    assert isinstance(out, torch.Tensor)
    expected = torch.nn.functional.layer_norm(x.float(), (WIDTH,), eps=1e-6) * mul + add
    return float((out.float() - expected).norm() / expected.norm())


def _failure(fault: BaseException) -> str:
    return f"self-test failed: {(str(fault).splitlines() or [type(fault).__name__])[0]}"


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
    """The findings as text, one per line."""
    lines = ["system"] + [f"  {key:<22} {value}" for key, value in findings["system"].items()]
    lines += library_lines(findings["libraries"])
    if (card := findings["card"]) is not None:
        lines += choice_lines([Choice(what, **one) for what, one in card.items()])
    lines.append(f"attention backends (auto: {findings['auto']})")
    for name, backend in findings["attention"].items():
        has_lse = backend["usable"] and backend["lse_error"] is not None
        lse = f", log-sum-exp {backend['lse_error']:.1e}" if has_lse else ""
        lines.append(f"  {name:<22} {_state(backend)}{lse}  [{backend['summary']}]")
    lines.append("precisions")
    for name, precision in findings["precisions"].items():
        lines.append(f"  {name:<22} {_state(precision)}  [{precision['summary']}]")
    lines += ["packed weights", f"  GGUF                   usable  [{', '.join(FORMATS)}]"]
    for name, matmul in findings["packed"]["products"].items():
        lines.append(f"  {name:<22} usable, dequantised for each matmul; direct matmul: {packed_state(matmul)}")
    without = "" if findings["kernels"]["usable"] else f"; {fused.WITHOUT}"
    lines.append(f"fused kernels            {_state(findings['kernels'])}{without}")
    video, assets = findings["video"], findings["embedded model"]
    lines.append(f"video                    {'H.264 through PyAV' if video['h264'] else video['why_not']}")
    kept = findings["compile cache"]
    lines.append(
        f"compile cache            {kept['folder'] if kept['why_not'] is None else 'not used: ' + kept['why_not']}"
    )
    lines.append(f"embedded model           {len(assets['files'])} files, {assets['megabytes']} MB")
    return "\n".join(lines)


def packed_state(found: dict[str, Any]) -> str:
    return f"self-test error {found['error']:.1e}, else untested on hardware" if found["usable"] else found["why_not"]


def _state(found: dict[str, Any]) -> str:
    return f"usable, self-test error {found['error']:.1e}" if found["usable"] else f"not usable: {found['why_not']}"

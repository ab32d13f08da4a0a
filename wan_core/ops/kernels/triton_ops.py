"""The fused operations as torch custom ops that launch the kernels of `triton_rows`.

`torch.compile` treats each op as one opaque call. If an argument is not used again, its memory holds the result: at
720p every tensor of the size of the tokens is 0.72 GiB.

Legend: B batch, S tokens rounded up to whole blocks, C channels, H heads, D head dim. Tensors are bf16 or float16 and
contiguous unless stated otherwise.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

from wan_core.ops.custom_ops import operator
from wan_core.ops.kernels import reference
from wan_core.ops.kernels.block_layout import Blocked, padded
from wan_core.ops.kernels.formats import BLOCK, FP8, FP8_MAX, Format, Quantized
from wan_core.ops.kernels.triton_rows import (
    activate_kernel,
    change_kernel,
    hadamard_kernel,
    head_norm_kernel,
    residual_norm_kernel,
    scale_kernel,
)

MIXED_ROWS, MIXED_TILES = 64, 8  # of `hadamard_kernel`: heads of tokens in a tile, and tiles in a program
_FMT = {"": 0, "row": 1, "block": 2}


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Make the device of x current, because Triton launches there. (On a CPU Triton's interpreter runs.)"""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _parts(C: int) -> dict[str, int]:
    """Sizes A and B of the two parts of a row of C numbers (see `triton_rows`), and the number of warps."""
    largest = 1 << (C.bit_length() - 1)
    first = largest // 2 if largest == C else largest
    second = triton.next_power_of_2(C - first)
    warps = max((first + second) // 2048 * 2, 1)
    return {"A": first, "B": second, "num_warps": min(1 << (warps.bit_length() - 1), 8)}


def _outputs(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Empty outputs of a row kernel: values [..., C] and, for FP8, scales. Block scales are stored group by group, as
    the kernels write them."""
    if not fmt:
        return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(0, dtype=torch.float32)
    data = torch.empty(x.shape, dtype=FP8, device=x.device)
    if fmt == "row":
        return data, torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    groups = x.new_empty((x.shape[-1] // BLOCK, *x.shape[:-1]), dtype=torch.float32)
    return data, groups.movedim(0, -1)


def _launch_residual_norm(
    x: Tensor, update: Tensor | None, gate: Tensor | None, mul: Tensor | None, add: Tensor | None, eps: float, fmt: str
) -> tuple[Tensor, Tensor]:
    assert x.is_contiguous() and (update is None or update.is_contiguous())
    C = x.shape[-1]
    rows = x.numel() // C
    none = x.new_empty(0, dtype=torch.float32)
    out, scales = _outputs(x, fmt) if mul is not None else (none, none)
    groups = [max(rows // (v.numel() // C), 1) for v in (gate, mul) if v is not None]  # rows that share a vector
    per_program = 8 if all(group % 8 == 0 or group == rows for group in groups) else 1
    parts = _parts(C)
    if update is not None and gate is not None:  # a second input to load: twice the warps were faster on an H200
        parts["num_warps"] = min(2 * parts["num_warps"], 8)
    with on_device_of(x):
        residual_norm_kernel[(triton.cdiv(rows, per_program),)](
            x, update if update is not None else x, _vector(gate, none), _vector(mul, none), _vector(add, none),
            out, scales, rows, C, groups[0] if gate is not None else 1, groups[-1] if mul is not None else 1, eps,
            HAS_UPDATE=update is not None, HAS_GATE=gate is not None, HAS_NORM=mul is not None, FMT=_FMT[fmt],
            ROWS=per_program, LIMIT=FP8_MAX, **parts,
        )  # fmt: skip
    return out, scales


def _vector(values: Tensor | None, none: Tensor) -> Tensor:
    return none if values is None else values.float().contiguous()


@operator("norm", lambda x, mul, add, eps, fmt: _outputs(x, fmt))
def _norm(x: Tensor, mul: Tensor, add: Tensor, eps: float, fmt: str) -> tuple[Tensor, Tensor]:
    return _launch_residual_norm(x, None, None, mul, add, eps, fmt)


@operator("residual_norm", lambda x, update, gate, mul, add, eps, fmt: _outputs(x, fmt), mutates_args=("x",))
def _residual_norm(
    x: Tensor, update: Tensor, gate: Tensor | None, mul: Tensor, add: Tensor, eps: float, fmt: str
) -> tuple[Tensor, Tensor]:
    return _launch_residual_norm(x, update, gate, mul, add, eps, fmt)


@operator("residual", mutates_args=("x",))
def _residual(x: Tensor, update: Tensor, gate: Tensor | None) -> None:
    _launch_residual_norm(x, update, gate, None, None, 0.0, "")


@operator("head_norm", mutates_args=("x",))
def _head_norm(x: Tensor, weight: Tensor, eps: float, rope: Tensor | None) -> None:
    assert x.is_contiguous()
    C = x.shape[-1]
    rows = x.numel() // C
    with on_device_of(x):
        head_norm_kernel[(triton.cdiv(rows, 4),)](
            x, weight, weight if rope is None else rope.contiguous(), rows, x.shape[-2], C, eps,
            ROPE=rope is not None, PAIRS=1 if rope is None else rope.shape[-2], ROWS=4, **_parts(C),
        )  # fmt: skip


def _mixed_shape(x: Tensor, size: int) -> Tensor:
    """Empty FP8 of the shape of x [B, L, H, D], or [B, H, size, D]."""
    shape = (x.shape[0], x.shape[2], size, x.shape[3]) if size else x.shape
    return x.new_empty(shape, dtype=FP8)


@operator("hadamard_fp8", lambda x, scale, mean, size: _mixed_shape(x, size))
def _hadamard_fp8(x: Tensor, scale: Tensor, mean: Tensor | None, size: int) -> Tensor:
    """In the layout of `_mixed_shape`, zeros after the tokens. The matrix is made in here, where nothing is compiled:
    it is cached on the device."""
    batch, tokens, heads, dim = x.shape
    assert x.stride(-1) == 1
    out = _mixed_shape(x, size)
    if size:
        out[:, :, tokens:].view(torch.uint8).zero_()
    rows = batch * tokens * heads
    mean = None if mean is None else reference.hadamard_heads(mean.float()).expand(batch, 1, heads, dim).contiguous()
    with on_device_of(x):
        hadamard_kernel[(triton.cdiv(rows, MIXED_ROWS * MIXED_TILES),)](
            x, reference.head_signs(dim, x.device, x.dtype), scale if mean is None else mean, scale, out,
            rows, tokens, heads, size, *x.stride()[:3], heads * dim,
            CENTRE=mean is not None, BY_HEADS=size > 0, D=dim, ROWS=MIXED_ROWS, TILES=MIXED_TILES, num_warps=4,
        )  # fmt: skip
    return out


def _launch_activate(x: Tensor, out: Tensor, scales: Tensor, fmt: str, gelu: bool) -> None:
    assert x.is_contiguous()
    C = x.shape[-1]
    rows = x.numel() // C
    with on_device_of(x):
        activate_kernel[(rows,)](x, out, scales, rows, C, GELU=gelu, FMT=_FMT[fmt], LIMIT=FP8_MAX, **_parts(C))


@operator("gelu", mutates_args=("x",))
def _gelu(x: Tensor) -> None:
    _launch_activate(x, x, x.new_empty(0, dtype=torch.float32), "", True)


@operator("activate", lambda x, fmt, gelu: _outputs(x, fmt))
def _activate(x: Tensor, fmt: str, gelu: bool) -> tuple[Tensor, Tensor]:
    out, scales = _outputs(x, fmt)
    _launch_activate(x, out, scales, fmt, gelu)
    return out, scales


@operator("quantize_tensor", lambda x, amax: (x.new_empty(x.shape, dtype=FP8), x.new_empty(1, dtype=torch.float32)))
def _quantize_tensor(x: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    amax = torch.linalg.vector_norm(x, float("inf")) if amax is None else amax.to(x.dtype)
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    with on_device_of(x):
        scale_kernel[(triton.cdiv(x.numel(), 8192),)](
            x, out, amax, scale, x.numel(), WIDTH=8192, LIMIT=FP8_MAX, num_warps=8
        )
    return out, scale


# ------------------------------------------------------------- functions of `fused` with the same name and meaning


def norm(x: Tensor, mul: Tensor, add: Tensor, eps: float, fmt: Format | None) -> Tensor | Quantized:
    return _result(*_norm(x.contiguous(), mul, add, eps, fmt or ""), fmt)


def residual_norm(
    x: Tensor, update: Tensor, gate: Tensor | None, mul: Tensor, add: Tensor, eps: float, fmt: Format | None
) -> tuple[Tensor, Tensor | Quantized]:
    x = x.contiguous()
    out, scales = _residual_norm(x, update.contiguous(), gate, mul, add, eps, fmt or "")
    return x, _result(out, scales, fmt)


def residual(x: Tensor, update: Tensor, gate: Tensor | None) -> Tensor:
    x = x.contiguous()
    _residual(x, update.contiguous(), gate)
    return x


def head_norm(x: Tensor, weight: Tensor, eps: float, rope: Tensor | None, heads: int) -> Tensor:
    x = x.contiguous()
    _head_norm(x, weight, eps, rope)
    return x.unflatten(-1, (heads, -1))


def hadamard_fp8(x: Tensor, scale: Tensor, mean: Tensor | None, block: int) -> Quantized | Blocked:
    x = x if x.stride(-1) == 1 else x.contiguous()
    if block:
        return Blocked(_hadamard_fp8(x, scale, mean, padded(x.shape[1], block)), scale, x.shape[1])
    return Quantized(_hadamard_fp8(x, scale, mean, 0), scale)


def gelu(x: Tensor, fmt: Format | None) -> Tensor | Quantized:
    x = x.contiguous()
    if fmt is None:
        _gelu(x)
        return x
    return Quantized(*_activate(x, fmt, True))


def quantize(x: Tensor, fmt: Format, amax: Tensor | None = None) -> Quantized:
    x = x.contiguous()
    return Quantized(*(_quantize_tensor(x, amax) if fmt == "tensor" else _activate(x, fmt, False)))


def with_change(data: Tensor, ratio: Tensor, total: Tensor, scale: Tensor, tries: int) -> Tensor:
    """That of `wan_core.ops.quant.changed`."""
    out, parts = torch.empty_like(data), _parts(data.shape[1])
    with on_device_of(data):
        change_kernel[(len(data),)](
            data, ratio.contiguous(), total, scale.contiguous(), out, data.shape[1],
            TRIES=tries, LIMIT=FP8_MAX, **parts | {"num_warps": 2 * parts["num_warps"]},
        )  # fmt: skip
    return out


def _result(out: Tensor, scales: Tensor, fmt: Format | None) -> Tensor | Quantized:
    return out if fmt is None else Quantized(out, scales)

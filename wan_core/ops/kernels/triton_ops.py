"""The fused operations in Triton, as torch custom ops: `torch.compile` sees each as one call and does not look inside.

Legend: rows are tokens of all samples, C channels, H heads, D head dim. All tensors bf16 and contiguous but for what is
said. A program takes `ROWS` consecutive rows and keeps what they share (modulation, weights) in registers.

Results go into the memory of an argument that is not used again, where there is one: at 720p every tensor of the size
of the tokens is 0.72 GiB.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from wan_core.ops.custom_ops import operator, shapes_of
from wan_core.ops.kernels.block_layout import Blocked, padded
from wan_core.ops.kernels.formats import BLOCK, FP8, FP8_MAX, Format, Quantized

# ------------------------------------------------------------------------------------------------------------- kernels
#
# A row is held in registers as two parts whose lengths are powers of two, as Triton wants them: A numbers and up to B
# more (5120 = 4096 + 1024, 3072 = 2048 + 1024, 13824 = 8192 + 8192 with a mask). One part of 8192 with a third of its
# lanes masked off was 1.3 to 1.6 times slower.


@triton.jit
def _columns(C, A: tl.constexpr, B: tl.constexpr):
    second = A + tl.arange(0, B)
    return tl.arange(0, A), second, second < C


@triton.jit
def _load(source, row, C, A: tl.constexpr, B: tl.constexpr):
    first, second, mask = _columns(C, A, B)
    at = source + row.to(tl.int64) * C
    return tl.load(at + first).to(tl.float32), tl.load(at + second, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(a, b, target, row, C, A: tl.constexpr, B: tl.constexpr):
    first, second, mask = _columns(C, A, B)
    at = target + row.to(tl.int64) * C
    tl.store(at + first, a.to(target.dtype.element_ty))
    tl.store(at + second, b.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _store_heads(a, b, target, row, tokens, padded, C, HEAD: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """A row into [B, H, padded, D]."""
    first, second, mask = _columns(C, A, B)
    at = target + (row // tokens).to(tl.int64) * C * padded + (row % tokens).to(tl.int64) * HEAD
    far = padded.to(tl.int64) * HEAD
    tl.store(at + (first // HEAD) * far + first % HEAD, a.to(target.dtype.element_ty))
    tl.store(at + (second // HEAD) * far + second % HEAD, b.to(target.dtype.element_ty), mask=mask)


@triton.jit
def _groups_to_fp8(part, scales, row, group, count, rows, WIDTH: tl.constexpr, LIMIT: tl.constexpr):
    """`part` in units of one scale for every 128 of its numbers; writes the scales of groups `group` + 0, 1, ..."""
    values = tl.reshape(part, (WIDTH // 128, 128))
    amax = tl.maximum(tl.max(tl.abs(values), 1), 1e-12)
    index = group + tl.arange(0, WIDTH // 128)
    tl.store(scales + index * rows + row, amax / LIMIT, mask=index < count)  # the scales of one group lie together
    return tl.reshape(values * (LIMIT / amax)[:, None], (WIDTH,))


@triton.jit
def _store_in(
    a, b, target, scales, row, C, rows, FMT: tl.constexpr, A: tl.constexpr, B: tl.constexpr, LIMIT: tl.constexpr
):
    """Write one row as it is (FMT 0), in FP8 with one scale (1), or with one for every 128 numbers (2). Numbers beyond
    the row's end must be 0."""
    if FMT == 1:
        amax = tl.maximum(tl.maximum(tl.max(tl.abs(a)), tl.max(tl.abs(b))), 1e-12)
        tl.store(scales + row, amax / LIMIT)
        a = a * (LIMIT / amax)
        b = b * (LIMIT / amax)
    elif FMT == 2:
        a = _groups_to_fp8(a, scales, row, 0, C // 128, rows, A, LIMIT)
        b = _groups_to_fp8(b, scales, row, A // 128, C // 128, rows, B, LIMIT)
    _store(a, b, target, row, C, A, B)


@triton.jit
def _residual_norm_kernel(
    x, update, gate, mul, add, out, scales, rows, C, gate_group, norm_group, eps,
    HAS_UPDATE: tl.constexpr, HAS_GATE: tl.constexpr, HAS_NORM: tl.constexpr, FMT: tl.constexpr,
    ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    if HAS_GATE:  # the rows of a program share one vector of each kind
        gate_a, gate_b = _load(gate, first // gate_group, C, A, B)
    if HAS_NORM:
        mul_a, mul_b = _load(mul, first // norm_group, C, A, B)
        add_a, add_b = _load(add, first // norm_group, C, A, B)
    for i in range(ROWS):
        row = first + i
        if row < rows:
            a, b = _load(x, row, C, A, B)
            if HAS_UPDATE:
                change_a, change_b = _load(update, row, C, A, B)
                if HAS_GATE:
                    change_a = change_a * gate_a
                    change_b = change_b * gate_b
                a = (a + change_a).to(x.dtype.element_ty).to(tl.float32)
                b = (b + change_b).to(x.dtype.element_ty).to(tl.float32)
                _store(a, b, x, row, C, A, B)
            if HAS_NORM:
                mean = (tl.sum(a) + tl.sum(b)) / C
                variance = (tl.sum(a * a) + tl.sum(b * b)) / C - mean * mean  # one round over the warps instead of two
                deviation = tl.rsqrt(tl.maximum(variance, 0.0) + eps)
                a = (a - mean) * deviation * mul_a + add_a
                b = (b - mean) * deviation * mul_b + add_b  # beyond the row's end mul and add are 0
                _store_in(a, b, out, scales, row, C, rows, FMT, A, B, LIMIT)


@triton.jit
def _rotate(part, cos, sin, PAIRS: tl.constexpr, WIDTH: tl.constexpr):
    even, odd = tl.split(tl.reshape(part, (WIDTH // (2 * PAIRS), PAIRS, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (WIDTH,))


@triton.jit
def _head_norm_kernel(
    x, weight, rope, mean, out, scale, rows, tokens, padded, C, eps, factor,
    ROPE: tl.constexpr, CENTRE: tl.constexpr, FP8_OUT: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    HEAD: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    weight_a, weight_b = _load(weight, first * 0, C, A, B)
    if CENTRE:
        mean_a, mean_b = _load(mean, first * 0, C, A, B)
    if FP8_OUT:
        unit = tl.maximum(tl.max(tl.abs(weight_a)), tl.max(tl.abs(weight_b))) * factor
        if first == 0:
            tl.store(scale, unit)
    for i in range(ROWS):
        row = first + i
        if row < rows:
            a, b = _load(x, row, C, A, B)
            deviation = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / C + eps)
            a = a * deviation * weight_a
            b = b * deviation * weight_b
            if ROPE:
                pair = rope + (row % tokens) * (2 * PAIRS) + 2 * tl.arange(0, PAIRS)
                cos = tl.load(pair)[None, :]
                sin = tl.load(pair + 1)[None, :]
                a = _rotate(a, cos, sin, PAIRS, A)
                b = _rotate(b, cos, sin, PAIRS, B)
            if CENTRE:
                a = a - mean_a
                b = b - mean_b
            if FP8_OUT:
                a = a / unit
                b = b / unit
            if HEAD > 0:
                _store_heads(a, b, out, row, tokens, padded, C, HEAD, A, B)
            else:
                _store(a, b, out, row, C, A, B)


@triton.jit
def _activate_kernel(
    x, out, scales, rows, C,
    GELU: tl.constexpr, FMT: tl.constexpr, A: tl.constexpr, B: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    a, b = _load(x, row, C, A, B)
    if GELU:  # 0.5 x (1 + tanh u) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
        a = a * tl.sigmoid(1.5957691216057308 * (a + 0.044715 * a * a * a))
        b = b * tl.sigmoid(1.5957691216057308 * (b + 0.044715 * b * b * b))
    _store_in(a, b, out, scales, row, C, rows, FMT, A, B, LIMIT)


@triton.jit
def _scale_kernel(x, out, amax, scale, count, WIDTH: tl.constexpr, LIMIT: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    largest = tl.maximum(tl.load(amax).to(tl.float32), 1e-12)
    if tl.program_id(0) == 0:
        tl.store(scale, largest / LIMIT)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, (value * (LIMIT / largest)).to(out.dtype.element_ty), mask=at < count)


# ------------------------------------------------------------------------------------------------------------ launching

_FMT = {"": 0, "row": 1, "block": 2}


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's. (On a CPU its interpreter runs.)"""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _parts(C: int) -> dict[str, int]:
    """How a row of C numbers is held: two parts and the warps that share them."""
    largest = 1 << (C.bit_length() - 1)
    first = largest // 2 if largest == C else largest
    second = triton.next_power_of_2(C - first)
    warps = max((first + second) // 2048 * 2, 1)
    return {"A": first, "B": second, "num_warps": min(1 << (warps.bit_length() - 1), 8)}


def _outputs(x: Tensor, fmt: str) -> tuple[Tensor, Tensor]:
    """Where a row kernel writes: values like x and, for FP8, scales. Block scales lie with their rows together."""
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
    if update is not None and gate is not None:  # twice the numbers in flight, twice the warps: measured on an H200
        parts["num_warps"] = min(2 * parts["num_warps"], 8)
    with _on(x):
        _residual_norm_kernel[(triton.cdiv(rows, per_program),)](
            x, update if update is not None else x, _vector(gate, none), _vector(mul, none), _vector(add, none),
            out, scales, rows, C, groups[0] if gate is not None else 1, groups[-1] if mul is not None else 1, eps,
            HAS_UPDATE=update is not None, HAS_GATE=gate is not None, HAS_NORM=mul is not None, FMT=_FMT[fmt],
            ROWS=per_program, LIMIT=FP8_MAX, **parts,
        )  # fmt: skip
    return out, scales


def _vector(values: Tensor | None, none: Tensor) -> Tensor:
    return none if values is None else values.float().contiguous()


@operator("norm")
def _norm(x: Tensor, mul: Tensor, add: Tensor, eps: float, fmt: str) -> tuple[Tensor, Tensor]:
    return _launch_residual_norm(x, None, None, mul, add, eps, fmt)


@operator("residual_norm", mutates_args=("x",))
def _residual_norm(
    x: Tensor, update: Tensor, gate: Tensor | None, mul: Tensor, add: Tensor, eps: float, fmt: str
) -> tuple[Tensor, Tensor]:
    return _launch_residual_norm(x, update, gate, mul, add, eps, fmt)


@operator("residual", mutates_args=("x",))
def _residual(x: Tensor, update: Tensor, gate: Tensor | None) -> None:
    _launch_residual_norm(x, update, gate, None, None, 0.0, "")


@shapes_of(_norm)
def _(x: Tensor, mul: Tensor, add: Tensor, eps: float, fmt: str) -> tuple[Tensor, Tensor]:
    return _outputs(x, fmt)


@shapes_of(_residual_norm)
def _(
    x: Tensor, update: Tensor, gate: Tensor | None, mul: Tensor, add: Tensor, eps: float, fmt: str
) -> tuple[Tensor, Tensor]:
    return _outputs(x, fmt)


@shapes_of(_residual)
def _(x: Tensor, update: Tensor, gate: Tensor | None) -> None:
    return None


def _launch_head_norm(
    x: Tensor,
    out: Tensor,
    weight: Tensor,
    eps: float,
    rope: Tensor | None,
    mean: Tensor | None,
    factor: float,
    head: int = 0,
) -> Tensor:
    """head: D, where `out` is [B, H, S, D]; 0 where it lies like x."""
    assert x.is_contiguous()
    C = x.shape[-1]
    rows = x.numel() // C
    fp8 = out.dtype == FP8
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    table = weight if rope is None else rope.contiguous()
    with _on(x):
        _head_norm_kernel[(triton.cdiv(rows, 4),)](
            x, weight, table, scale if mean is None else mean, out, scale, rows, x.shape[-2], out.shape[-2], C, eps,
            factor, ROPE=rope is not None, CENTRE=mean is not None, FP8_OUT=fp8,
            PAIRS=1 if rope is None else rope.shape[-2], ROWS=4, HEAD=head, **_parts(C),
        )  # fmt: skip
    return scale


@operator("head_norm", mutates_args=("x",))
def _head_norm(x: Tensor, weight: Tensor, eps: float, rope: Tensor | None) -> None:
    _launch_head_norm(x, x, weight, eps, rope, None, 0.0)


@shapes_of(_head_norm)
def _(x: Tensor, weight: Tensor, eps: float, rope: Tensor | None) -> None:
    return None


@operator("head_norm_fp8")
def _head_norm_fp8(x: Tensor, weight: Tensor, eps: float, rope: Tensor, mean: Tensor | None) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    factor = (1.0 if mean is None else 2.0) * math.sqrt(x.shape[-1]) / FP8_MAX
    return out, _launch_head_norm(x, out, weight, eps, rope, mean, factor)


@shapes_of(_head_norm_fp8)
def _(x: Tensor, weight: Tensor, eps: float, rope: Tensor, mean: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=FP8), x.new_empty(1, dtype=torch.float32)


@operator("head_norm_fp8_blocks")
def _head_norm_fp8_blocks(
    x: Tensor, weight: Tensor, eps: float, rope: Tensor, mean: Tensor | None, head: int, padded: int
) -> tuple[Tensor, Tensor]:
    """FP8 [B, H, padded, D], zeros after the tokens."""
    batch, tokens, C = x.shape
    out = torch.empty((batch, C // head, padded, head), dtype=FP8, device=x.device)
    out[:, :, tokens:].view(torch.uint8).zero_()
    factor = (1.0 if mean is None else 2.0) * math.sqrt(C) / FP8_MAX
    return out, _launch_head_norm(x, out, weight, eps, rope, mean, factor, head)


@shapes_of(_head_norm_fp8_blocks)
def _(
    x: Tensor, weight: Tensor, eps: float, rope: Tensor, mean: Tensor | None, head: int, padded: int
) -> tuple[Tensor, Tensor]:
    out = x.new_empty((x.shape[0], x.shape[2] // head, padded, head), dtype=FP8)
    return out, x.new_empty(1, dtype=torch.float32)


def _launch_activate(x: Tensor, out: Tensor, scales: Tensor, fmt: str, gelu: bool) -> None:
    assert x.is_contiguous()
    C = x.shape[-1]
    rows = x.numel() // C
    with _on(x):
        _activate_kernel[(rows,)](x, out, scales, rows, C, GELU=gelu, FMT=_FMT[fmt], LIMIT=FP8_MAX, **_parts(C))


@operator("gelu", mutates_args=("x",))
def _gelu(x: Tensor) -> None:
    _launch_activate(x, x, x.new_empty(0, dtype=torch.float32), "", True)


@shapes_of(_gelu)
def _(x: Tensor) -> None:
    return None


@operator("activate")
def _activate(x: Tensor, fmt: str, gelu: bool) -> tuple[Tensor, Tensor]:
    out, scales = _outputs(x, fmt)
    _launch_activate(x, out, scales, fmt, gelu)
    return out, scales


@shapes_of(_activate)
def _(x: Tensor, fmt: str, gelu: bool) -> tuple[Tensor, Tensor]:
    return _outputs(x, fmt)


@operator("quantize_tensor")
def _quantize_tensor(x: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    amax = torch.linalg.vector_norm(x, float("inf")) if amax is None else amax.to(x.dtype)
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    with _on(x):
        _scale_kernel[(triton.cdiv(x.numel(), 8192),)](
            x, out, amax, scale, x.numel(), WIDTH=8192, LIMIT=FP8_MAX, num_warps=8
        )
    return out, scale


@shapes_of(_quantize_tensor)
def _(x: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=FP8), x.new_empty(1, dtype=torch.float32)


# ------------------------------------------------------------------------------------- what `fused` calls, same meaning


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


def head_norm_fp8(
    x: Tensor, weight: Tensor, eps: float, rope: Tensor, heads: int, mean: Tensor | None, block: int = 0
) -> Quantized | Blocked:
    if block:
        size = padded(x.shape[1], block)
        memory, scale = _head_norm_fp8_blocks(x.contiguous(), weight, eps, rope, mean, x.shape[-1] // heads, size)
        return Blocked(memory, scale, x.shape[1])
    data, scale = _head_norm_fp8(x.contiguous(), weight, eps, rope, mean)
    return Quantized(data.unflatten(-1, (heads, -1)), scale)


def gelu(x: Tensor, fmt: Format | None) -> Tensor | Quantized:
    x = x.contiguous()
    if fmt is None:
        _gelu(x)
        return x
    return Quantized(*_activate(x, fmt, True))


def quantize(x: Tensor, fmt: Format, amax: Tensor | None = None) -> Quantized:
    x = x.contiguous()
    return Quantized(*(_quantize_tensor(x, amax) if fmt == "tensor" else _activate(x, fmt, False)))


def _result(out: Tensor, scales: Tensor, fmt: Format | None) -> Tensor | Quantized:
    return out if fmt is None else Quantized(out, scales)

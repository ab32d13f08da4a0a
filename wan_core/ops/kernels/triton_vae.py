"""The passes between the convolutions of the VAE as Triton kernels, each of which reads and writes once.

Before a causal convolution: the bias of the one before, RMSNorm, SiLU, earlier frames in front. Plain torch reads and
writes the activations nine times for it, and once more for the frames that it keeps for the next chunk. After the
second one of a residual block: its bias, and the sum.

Legend: C channels, T/Y/X frames, rows, columns; tensors are bf16 with channels last in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from wan_core.ops.kernels.triton_ops import on_device_of

NUMBERS = 4096  # of one program: enough to hide the latency of memory, few enough for registers


@triton.jit
def norm_silu_extend_kernel(
    x, bias, gamma, earlier, out, kept, frame_stride, row_stride, frames, Y, X, C, LEAD: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_EARLIER: tl.constexpr, KEEPS: tl.constexpr, BESIDE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """A row is one position of the extended frames, [LEAD + frames, Y, X] of them; x has strides in numbers. BESIDE:
    each frame of the result has the LEAD before it beside it, [frames, Y, X, LEAD + 1, C]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    plane = Y * X
    frame, inside = row // plane, row % plane
    exists = (frame < frames + LEAD)[:, None] & (column < C)[None, :]
    leads = (frame < LEAD)[:, None]
    source = (frame - LEAD) * frame_stride + (inside // X) * row_stride + (inside % X) * C
    value = tl.load(x + source[:, None] + column[None, :], mask=exists & ~leads, other=0.0).to(tl.float32)
    if HAS_BIAS:
        added = tl.load(bias + column, mask=column < C, other=0.0).to(tl.float32)
        value += tl.where(leads, 0.0, added[None, :])  # earlier frames that do not exist are zeros
    scale = tl.load(gamma + column, mask=column < C, other=0.0).to(tl.float32)
    norm = tl.sqrt(tl.sum(value * value, 1))
    value = value * (tl.sqrt(C * 1.0) / tl.maximum(norm, 1e-12))[:, None] * scale[None, :]
    value = value / (1.0 + tl.exp(-value))
    if HAS_EARLIER:
        before = tl.load(earlier + row[:, None] * C + column[None, :], mask=exists & leads, other=0.0)
        value = tl.where(leads, before.to(tl.float32), value)
    value = value.to(out.dtype.element_ty)
    if BESIDE:
        for tap in tl.static_range(LEAD + 1):
            reads = (frame >= tap) & (frame < frames + tap)
            at = ((row - tap * plane) * (LEAD + 1) + tap) * C
            tl.store(out + at[:, None] + column[None, :], value, mask=exists & reads[:, None])
    else:
        tl.store(out + row[:, None] * C + column[None, :], value, mask=exists)
    if KEEPS:
        at = (row - frames * plane)[:, None] * C + column[None, :]
        tl.store(kept + at, value, mask=exists & (frame >= frames)[:, None])


def norm_silu_extend(
    x: Tensor, bias: Tensor | None, gamma: Tensor, earlier: Tensor | None, lead: int, keep: bool, beside: bool = False
) -> tuple[Tensor, Tensor | None]:
    """SiLU of the RMSNorm of x [1, C, T, Y, X] + bias [C] with `lead` frames in front, `earlier` [1, C, lead, Y, X] or
    zeros (None), and a copy of the last `lead` frames of that if `keep`. As `layers.norm_silu_extend`. beside: not in
    front, but each frame's beside it, oldest first: [1, (lead + 1) * C, T, Y, X]."""
    _, C, T, Y, X = x.shape
    x = x.movedim(1, -1)
    if x.stride()[-2:] != (C, 1):
        x = x.contiguous()
    out = x.new_empty((1, T, Y, X, (lead + 1) * C) if beside else (1, lead + T, Y, X, C))
    kept = x.new_empty(1, lead, Y, X, C) if keep else out
    before = out if earlier is None else earlier.movedim(1, -1).contiguous()
    width = triton.next_power_of_2(C)
    rows = max(NUMBERS // width, 1)
    with on_device_of(x):
        norm_silu_extend_kernel[(triton.cdiv((lead + T) * Y * X, rows),)](
            x, x if bias is None else bias, gamma.flatten(), before, out, kept, x.stride(1), x.stride(2), T, Y, X, C,
            LEAD=lead, HAS_BIAS=bias is not None, HAS_EARLIER=earlier is not None, KEEPS=keep, BESIDE=beside, ROWS=rows,
            WIDTH=width, num_warps=4,
        )  # fmt: skip
    return out.movedim(-1, 1), kept.movedim(-1, 1) if keep else None


@triton.jit
def add_with_bias_kernel(h, rest, bias, more_bias, numbers, C, HAS_MORE: tl.constexpr, BLOCK: tl.constexpr):
    """h = h + rest + bias (+ more_bias); numbers are in the order of memory, channels last."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists, column = at < numbers, at % C
    total = tl.load(h + at, mask=exists).to(tl.float32) + tl.load(rest + at, mask=exists).to(tl.float32)
    total += tl.load(bias + column, mask=exists).to(tl.float32)
    if HAS_MORE:
        total += tl.load(more_bias + column, mask=exists).to(tl.float32)
    tl.store(h + at, total.to(h.dtype.element_ty), mask=exists)


def add_with_bias(h: Tensor, rest: Tensor, bias: Tensor, more_bias: Tensor | None) -> Tensor:
    """h + rest + the biases [C]; h and rest are [1, C, T, Y, X]. Written over h if its channels are last."""
    rows, others = (x.movedim(1, -1).contiguous() for x in (h, rest))
    with on_device_of(rows):
        add_with_bias_kernel[(triton.cdiv(rows.numel(), NUMBERS),)](
            rows, others, bias, bias if more_bias is None else more_bias, rows.numel(), rows.shape[-1],
            HAS_MORE=more_bias is not None, BLOCK=NUMBERS, num_warps=8,
        )  # fmt: skip
    return rows.movedim(-1, 1)

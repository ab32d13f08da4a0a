"""Triton kernels of the fused operations: each works on whole rows of half precision. `triton_ops` launches them.

Legend: rows are tokens of all samples, C channels, H heads, D head dim. A program handles `ROWS` consecutive rows and
keeps what they share (modulation, weights) in registers.

A row is held in registers as two parts whose lengths are powers of two, as Triton requires: A numbers and up to B more
(5120 = 4096 + 1024, 3072 = 2048 + 1024, 13824 = 8192 + 8192 with a mask). One part of 8192 with a third of its lanes
masked off was 1.3 to 1.6 times slower.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def _groups_to_fp8(part, scales, row, group, count, rows, WIDTH: tl.constexpr, LIMIT: tl.constexpr):
    """`part` divided by one scale for every 128 numbers; writes the scales of groups `group` + 0, 1, ..."""
    values = tl.reshape(part, (WIDTH // 128, 128))
    amax = tl.maximum(tl.max(tl.abs(values), 1), 1e-12)
    index = group + tl.arange(0, WIDTH // 128)
    tl.store(scales + index * rows + row, amax / LIMIT, mask=index < count)  # the scales of one group are contiguous
    return tl.reshape(values * (LIMIT / amax)[:, None], (WIDTH,))


@triton.jit
def _store_in(
    a, b, target, scales, row, C, rows, FMT: tl.constexpr, A: tl.constexpr, B: tl.constexpr, LIMIT: tl.constexpr
):
    """Write one row in the output's dtype (FMT 0), in FP8 with one scale (1), or in FP8 with a scale for every 128
    numbers (2). Numbers beyond the row's end must be 0."""
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
def residual_norm_kernel(
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
                variance = (
                    tl.sum(a * a) + tl.sum(b * b)
                ) / C - mean * mean  # one reduction over the warps instead of two
                deviation = tl.rsqrt(tl.maximum(variance, 0.0) + eps)
                a = (a - mean) * deviation * mul_a + add_a
                b = (b - mean) * deviation * mul_b + add_b  # beyond the row's end mul and add are 0
                _store_in(a, b, out, scales, row, C, rows, FMT, A, B, LIMIT)


@triton.jit
def _rotate(part, cos, sin, PAIRS: tl.constexpr, WIDTH: tl.constexpr):
    even, odd = tl.split(tl.reshape(part, (WIDTH // (2 * PAIRS), PAIRS, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (WIDTH,))


@triton.jit
def head_norm_kernel(
    x, weight, rope, rows, tokens, C, eps,
    ROPE: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    weight_a, weight_b = _load(weight, first * 0, C, A, B)
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
            _store(a, b, x, row, C, A, B)


@triton.jit
def hadamard_kernel(
    x, signs, mean, scale, out, rows, tokens, heads, padded, sample_stride, token_stride, head_stride, mean_stride,
    CENTRE: tl.constexpr, BY_HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """`TILES` times `ROWS` heads of tokens: x [B, L, H, D] times signs [D, D], minus mean [B, H, D], over scale [1], to
    out [B, L, H, D], or [B, H, padded, D] with BY_HEADS."""
    columns = tl.arange(0, D)
    matrix = tl.load(signs + columns[:, None] * D + columns[None, :])
    inverse = 1.0 / tl.load(scale)
    for tile in range(TILES):
        row = (tl.program_id(0).to(tl.int64) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None]
        head, token = row % heads, row // heads
        sample, token = token // tokens, token % tokens
        at = x + sample * sample_stride + token * token_stride + head * head_stride
        values = tl.load(at[:, None] + columns[None, :], mask=inside, other=0.0)
        mixed = tl.dot(values, matrix) * (D**-0.5)
        if CENTRE:
            at = mean + sample * mean_stride + head * D
            mixed = mixed - tl.load(at[:, None] + columns[None, :], mask=inside, other=0.0)
        place = row
        if BY_HEADS:
            place = (sample * heads + head) * padded + token
        tl.store(out + place[:, None] * D + columns[None, :], (mixed * inverse).to(out.dtype.element_ty), mask=inside)


@triton.jit
def activate_kernel(
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
def scale_kernel(x, out, amax, scale, count, WIDTH: tl.constexpr, LIMIT: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    largest = tl.maximum(tl.load(amax).to(tl.float32), 1e-12)
    if tl.program_id(0) == 0:
        tl.store(scale, largest / LIMIT)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, (value * (LIMIT / largest)).to(out.dtype.element_ty), mask=at < count)


@triton.jit
def _numbers_of_fp8(x, LIMIT: tl.constexpr):
    """The numbers of E4M3 nearest to float32 x, ties to even: 3 bits after the first, steps of 2^-9 at least. By
    arithmetic, so that Triton's interpreter computes what a card does."""
    x = tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, 0.015625) * 1572864.0  # 1.5 * 2^23 steps: a sum with it has no digits below one
    return (x + step) - step


@triton.jit
def change_kernel(
    data, ratio, total, scale, out, C, TRIES: tl.constexpr, A: tl.constexpr, B: tl.constexpr, LIMIT: tl.constexpr
):
    """`with_change` of `wan_core.ops.quant.changed`, a row in a program."""
    row = tl.program_id(0)
    a, b = _load(data, row, C, A, B)
    more_a, more_b = _load(total, row, C, A, B)
    a *= tl.load(ratio + row)
    b *= tl.load(ratio + row)
    more_a = more_a / tl.load(scale + row) - a
    more_b = more_b / tl.load(scale + row) - b
    size = tl.maximum(tl.sum(more_a * more_a) + tl.sum(more_b * more_b), 1e-30)
    base = tl.sum(a * more_a) + tl.sum(b * more_b)
    larger = 1.0
    made_a = _numbers_of_fp8(a + more_a, LIMIT)
    made_b = _numbers_of_fp8(b + more_b, LIMIT)
    for _ in tl.static_range(TRIES):
        left = (tl.sum(made_a * more_a) + tl.sum(made_b * more_b) - base) / size
        larger = larger / tl.sqrt(tl.minimum(tl.maximum(left, 0.0625), 16.0))
        made_a = _numbers_of_fp8(a + more_a * larger, LIMIT)
        made_b = _numbers_of_fp8(b + more_b * larger, LIMIT)
    _store(made_a, made_b, out, row, C, A, B)

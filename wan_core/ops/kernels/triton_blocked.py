"""Triton kernels for the passes of `blocked`.

Legend: B batch, L tokens, S tokens rounded up to whole blocks, H heads, D head dim (a power of two), n blocks (of
keys), r blocks of queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wan_core.ops.custom_ops import operator
from wan_core.ops.kernels.block_layout import Pooled
from wan_core.ops.kernels.formats import FP8, FP8_MAX
from wan_core.ops.kernels.triton_ops import on_device_of

ROWS = 128  # tokens of v that one program transposes
KEYS = 64  # block means that a program loads at a time


@triton.jit
def _values_kernel(x, out, amax, scale, tokens, size, C, D: tl.constexpr, ROWS: tl.constexpr, LIMIT: tl.constexpr):
    """[B, L, C] -> [B, H, D, S]. Each program handles ROWS tokens of one head."""
    part, head, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    unit = tl.maximum(tl.load(amax).to(tl.float32), 1e-12) / LIMIT
    if (part == 0) & (head == 0) & (sample == 0):
        tl.store(scale, unit)
    rows = part * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D)
    source = x + (sample.to(tl.int64) * tokens + rows.to(tl.int64))[:, None] * C + head * D + columns[None, :]
    values = tl.load(source, mask=(rows < tokens)[:, None], other=0.0).to(tl.float32) / unit
    transposed = tl.trans(tl.minimum(tl.maximum(values, -LIMIT), LIMIT).to(out.dtype.element_ty))  # [D, ROWS]
    heads = C // D
    target = out + ((sample * heads + head).to(tl.int64) * D + columns)[:, None] * size + rows[None, :]
    tl.store(target, transposed, mask=(rows < size)[None, :])


def _empty_values(x: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
    out = x.new_empty((x.shape[0], heads, x.shape[2] // heads, size), dtype=FP8)
    return out, x.new_empty(1, dtype=torch.float32)


@operator("quantize_values", _empty_values)
def quantize_values(x: Tensor, heads: int, size: int) -> tuple[Tensor, Tensor]:
    """bf16 [B, L, C] -> FP8 [B, H, D, size], its scale [1]."""
    batch, tokens, C = x.shape
    out, scale = _empty_values(x, heads, size)
    amax = torch.linalg.vector_norm(x, float("inf"))
    with on_device_of(x):
        _values_kernel[(triton.cdiv(size, ROWS), heads, batch)](
            x, out, amax, scale, tokens, size, C, D=C // heads, ROWS=ROWS, LIMIT=FP8_MAX, num_warps=8
        )
    return out, scale


@triton.jit
def _pool_kernel(
    x, mean, variance, tokens, count, sample_stride, token_stride, head_stride, channel_stride,
    BLOCK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    part, head, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = part * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, D)
    at = x + sample.to(tl.int64) * sample_stride + head.to(tl.int64) * head_stride
    inside = (rows < tokens)[:, None]
    at += rows.to(tl.int64)[:, None] * token_stride + columns[None, :] * channel_stride
    values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    size = tl.minimum(tokens - part * BLOCK, BLOCK).to(tl.float32)
    average = tl.sum(values, 0) / size
    away = tl.where(inside, values - average[None, :], 0.0)
    target = ((sample * tl.num_programs(1) + head).to(tl.int64) * count + part) * D + columns
    tl.store(mean + target, average)
    tl.store(variance + target, tl.sum(away * away, 0) / size)


def pool(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Means and variances float32 [B, H, n, D] of the blocks of x [B, L, H, D], any strides."""
    batch, tokens, heads, dim = x.shape
    count = triton.cdiv(tokens, block)
    mean = torch.empty((batch, heads, count, dim), dtype=torch.float32, device=x.device)
    variance = torch.empty_like(mean)
    with on_device_of(x):
        _pool_kernel[(count, heads, batch)](
            x, mean, variance, tokens, count, *x.stride(), BLOCK=block, D=dim, num_warps=4
        )
    return mean, variance


@triton.jit
def _finish_kernel(
    out, lse, q, q_scale, keys, values, kept, sizes, slopes, tail, scale, target,
    tokens, rows_of_lse, row_blocks, count, pads, softmax_scale,
    out_sample, out_token, out_head, q_sample, q_token, q_head,
    PADS: tl.constexpr, POOLED: tl.constexpr, SLOPED: tl.constexpr, Q_SCALED: tl.constexpr, FP8_OUT: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    part, head, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    group = (sample * heads + head).to(tl.int64)
    block = part * ROWS // BLOCK  # of the queries
    rows = part * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D)
    inside = rows < tokens
    at = out + sample.to(tl.int64) * out_sample + head.to(tl.int64) * out_head
    found = tl.load(at + rows.to(tl.int64)[:, None] * out_token + columns[None, :], mask=inside[:, None], other=0.0)
    found = found.to(tl.float32)
    total = tl.load(lse + group * rows_of_lse + rows, mask=inside, other=0.0)
    weight = tl.full((ROWS,), 1.0, tl.float32)  # of `found`, in units of exp(total)
    if PADS:  # noqa: SIM102, the first condition is evaluated at compile time, the second at run time
        if tl.load(tail + group * row_blocks + block) != 0:
            real = 1.0 - tl.minimum(pads * tl.exp(-total), 1.0 - 0.0009765625)
            found = found / real[:, None]
            total = total + tl.log(real)
    if POOLED:
        at = q + sample.to(tl.int64) * q_sample + head.to(tl.int64) * q_head
        query = tl.load(at + rows.to(tl.int64)[:, None] * q_token + columns[None, :], mask=inside[:, None], other=0.0)
        query = query.to(tl.bfloat16)
        factor = softmax_scale
        if Q_SCALED:
            factor = factor * tl.load(q_scale)
        largest = total
        for start in range(0, count, KEYS):
            index = start + tl.arange(0, KEYS)
            there = index < count
            one = tl.load(
                keys + (group * count + index)[None, :] * D + columns[:, None], mask=there[None, :], other=0.0
            )
            scores = (
                tl.dot(query, one.to(tl.bfloat16)) * factor + tl.load(sizes + index, mask=there, other=0.0)[None, :]
            )
            read = tl.load(kept + (group * row_blocks + block) * count + index, mask=there, other=1)
            scores = tl.where((read != 0)[None, :], float("-inf"), scores)
            above = tl.maximum(largest, tl.max(scores, 1))
            shares = tl.exp(scores - above[:, None])
            fade = tl.exp(largest - above)
            two = tl.load(
                values + (group * count + index)[:, None] * D + columns[None, :], mask=there[:, None], other=0.0
            )
            found = found * fade[:, None] + tl.dot(shares.to(tl.bfloat16), two.to(tl.bfloat16))
            weight = weight * fade + tl.sum(shares, 1)
            largest = above
        found = found / weight[:, None]
        if SLOPED:
            at = slopes + ((group * row_blocks + block) * D + columns)[:, None] * D + columns[None, :]
            along = tl.dot(query, tl.load(at).to(tl.bfloat16))
            if Q_SCALED:
                along = along * tl.load(q_scale)
            found = found + along * (1.0 - tl.exp(total - largest) / weight)[:, None]
    if FP8_OUT:
        found = found / tl.load(scale)
        found = tl.minimum(tl.maximum(found, -LIMIT), LIMIT)
    at = (
        target + (sample.to(tl.int64) * tokens + rows.to(tl.int64))[:, None] * (heads * D) + head * D + columns[None, :]
    )
    tl.store(at, found.to(target.dtype.element_ty), mask=inside[:, None])


def finish(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    block: int,
    q_scale: Tensor | None,
    pads: int,
    tail: Tensor | None,
    pooled: Pooled | None,
    scale: Tensor | None,
) -> Tensor:
    """The Triton kernel for `blocked.finish`. It may overwrite `out`."""
    batch, tokens, heads, dim = out.shape
    row_blocks = triton.cdiv(tokens, block)
    slopes = None if pooled is None else pooled.slopes
    count = row_blocks if pooled is None else pooled.keys.shape[2]
    rows = min(block, 128)
    dtype = q.dtype if scale is None else FP8
    # Each program writes exactly the elements that it alone reads, so `out` can be overwritten.
    in_place = dtype == out.dtype and out.is_contiguous()
    result = out if in_place else torch.empty((batch, tokens, heads, dim), dtype=dtype, device=out.device)
    none = lse  # a placeholder that the kernel never reads
    assert out.stride(-1) == 1 == q.stride(-1) == lse.stride(-1)
    lse = lse if lse.is_contiguous() else lse.contiguous()
    with on_device_of(out):
        _finish_kernel[(triton.cdiv(tokens, rows), heads, batch)](
            out, lse, q, none if q_scale is None else q_scale,
            none if pooled is None else pooled.keys.to(torch.bfloat16).contiguous(),
            none if pooled is None else pooled.values.to(torch.bfloat16).contiguous(),
            none if pooled is None else pooled.kept.to(torch.uint8).contiguous(),
            none if pooled is None else pooled.sizes.log(),
            none if slopes is None else slopes.contiguous(),
            none if tail is None else tail.to(torch.uint8).contiguous(), none if scale is None else scale, result,
            tokens, lse.shape[-1], row_blocks, count, pads, dim**-0.5,
            *(out.stride(i) for i in range(3)), *(q.stride(i) for i in range(3)),
            PADS=pads > 0, POOLED=pooled is not None, SLOPED=slopes is not None,
            Q_SCALED=q_scale is not None, FP8_OUT=scale is not None,
            BLOCK=block, ROWS=rows, KEYS=KEYS, D=dim, LIMIT=FP8_MAX,
            num_warps=8, num_stages=2,
        )  # fmt: skip
    return result

"""Attention in one pass, in Triton, for cards from Ampere on: products, softmax and, where keys are chosen by blocks,
the means of the others.

Scores are in units of log2, because cards compute 2^x. A program has some rows of queries of one head. It reads the
keys and values that they attend to a tile at a time, and keeps the largest score, the sum of exponentials and the
weighted sum of values (arXiv:2205.14135, 2307.08691). Queries and keys may be rounded to INT8 with a scale for each row
(as in arXiv:2410.02367): queries here, keys in a pass before, their mean removed. Probabilities and values stay bf16.

Legend: B batch, L query tokens, S key tokens, H heads, D head dim, n blocks of keys, r blocks of queries, K blocks
read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wan_core.ops.cards import capability
from wan_core.ops.kernels.attention_tiles import Tile, tile_for
from wan_core.ops.kernels.block_layout import Pooled, sizes_of
from wan_core.ops.kernels.triton_ops import on_device_of

LOG2E = 1.4426950408889634
MEANS = 32  # block means that a program reads at a time
ROWS = 64  # keys that one program rounds


@triton.jit
def _rounded(x):
    """Rows of float32 [N, D] in INT8, and the scale of each [N]."""
    unit = tl.maximum(tl.max(tl.abs(x), 1), 1e-12) / 127.0
    return tl.floor(x / unit[:, None] + 0.5).to(tl.int8), unit


@triton.jit
def _round_kernel(
    x, mean, out, units, tokens, sample_stride, token_stride, head_stride, D: tl.constexpr, ROWS: tl.constexpr
):
    """x [B, S, H, D] minus mean [B, H, D] -> INT8 [B, H, S, D] and scales [B, H, S]."""
    part, head, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = (sample * tl.num_programs(1) + head).to(tl.int64)
    rows = part.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, D)
    inside = rows < tokens
    at = x + sample.to(tl.int64) * sample_stride + head.to(tl.int64) * head_stride
    values = tl.load(at + rows[:, None] * token_stride + columns[None, :], mask=inside[:, None], other=0.0)
    centre = tl.load(mean + group * D + columns)
    data, unit = _rounded(values.to(tl.float32) - centre[None, :])
    row = group * tokens + rows
    tl.store(out + row[:, None] * D + columns[None, :], data, mask=inside[:, None])
    tl.store(units + row, unit, mask=inside)


@triton.jit
def _add(acc, total, largest, scores, values):
    """The running sums with more scores [M, N], in units of log2, and values [N, D]."""
    above = tl.maximum(largest, tl.max(scores, 1))
    shares = tl.exp2(scores - above[:, None])
    fade = tl.exp2(largest - above)
    return tl.dot(shares.to(values.dtype), values, acc * fade[:, None]), total * fade + tl.sum(shares, 1), above


@triton.jit
def _read(
    acc, total, largest, query, factor, key_at, unit_at, value_at, left, key_token, value_token,
    INT8: tl.constexpr, MASKED: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The running sums with a tile of keys at `key_at`, of which `left` are there. factor [M]: of the products."""
    rows, columns = tl.arange(0, N), tl.arange(0, D)
    there = rows < left
    keys_at, values_at = key_at + rows[None, :] * key_token, value_at + rows[:, None] * value_token
    if MASKED:
        keys = tl.load(keys_at + columns[:, None], mask=there[None, :], other=0)
        values = tl.load(values_at + columns[None, :], mask=there[:, None], other=0.0)
    else:
        keys = tl.load(keys_at + columns[:, None])
        values = tl.load(values_at + columns[None, :])
    if INT8:
        units = tl.load(unit_at + rows, mask=there, other=0.0)
        products = tl.dot(query, keys, out_dtype=tl.int32).to(tl.float32) * units[None, :]
    else:
        products = tl.dot(query, keys)
    scores = products * factor[:, None]
    if MASKED:
        scores = tl.where(there[None, :], scores, float("-inf"))
    return _add(acc, total, largest, scores, values)


@triton.jit
def _attention_kernel(
    q, k, v, units, centre, blocks, counts, mean_keys, mean_values, sizes, kept, slopes, out, lse,
    queries, keys, row_blocks, width, count, scale,
    q_sample, q_token, q_head, k_sample, k_token, k_head, v_sample, v_token, v_head,
    INT8: tl.constexpr, SPARSE: tl.constexpr, COUNTS: tl.constexpr, POOLED: tl.constexpr, PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, MEANS: tl.constexpr,
    SLOPED: tl.constexpr,
):  # fmt: skip
    """centre: the mean that was removed from the keys, float32 [B, H, D], with INT8. blocks [B, H, r, K], counts
    [B, H, r], with SPARSE. mean_keys and mean_values bf16 [B, H, n, D], sizes [n] in log2, kept uint8 [B, H, r, n],
    slopes [B, H, r, D, D], with POOLED. PARTIAL: the keys do not fill tiles, or blocks."""
    part, head, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, group = tl.num_programs(1), (sample * tl.num_programs(1) + head).to(tl.int64)
    rows, columns = part * M + tl.arange(0, M), tl.arange(0, D)
    inside = rows < queries
    q_at = q + sample.to(tl.int64) * q_sample + head.to(tl.int64) * q_head
    query = tl.load(q_at + rows.to(tl.int64)[:, None] * q_token + columns[None, :], mask=inside[:, None], other=0.0)
    factor = tl.zeros((M,), tl.float32) + scale
    left_out = tl.zeros((M,), tl.float32)  # of each score, by the mean that was removed
    wide = query
    if INT8:
        left_out = tl.sum(query.to(tl.float32) * tl.load(centre + group * D + columns)[None, :], 1) * scale
        query, unit = _rounded(query.to(tl.float32))
        factor = factor * unit
    acc = tl.zeros((M, D), tl.float32)
    total = tl.zeros((M,), tl.float32)
    largest = tl.full((M,), float("-inf"), tl.float32)
    k_at = k + sample.to(tl.int64) * k_sample + head.to(tl.int64) * k_head
    v_at = v + sample.to(tl.int64) * v_sample + head.to(tl.int64) * v_head
    unit_at = units + group * keys
    row = group * row_blocks + part * M // BLOCK
    if SPARSE:
        chosen = tl.load(counts + row) if COUNTS else width
        for step in range(chosen * (BLOCK // N)):
            place = tl.load(blocks + row * width + step // (BLOCK // N))
            start = place.to(tl.int64) * BLOCK + step % (BLOCK // N) * N
            acc, total, largest = _read(
                acc, total, largest, query, factor, k_at + start * k_token, unit_at + start,
                v_at + start * v_token, keys - start, k_token, v_token, INT8, PARTIAL, N, D,
            )  # fmt: skip
    else:
        full = keys // N * N
        for _ in range(0, full, N):
            acc, total, largest = _read(
                acc, total, largest, query, factor, k_at, unit_at, v_at, N, k_token, v_token, INT8, False, N, D
            )
            k_at += N * k_token
            v_at += N * v_token
            unit_at += N
        if PARTIAL:
            acc, total, largest = _read(
                acc, total, largest, query, factor, k_at, unit_at, v_at, keys - full, k_token, v_token, INT8, True, N, D
            )
    read, before = total, largest
    if POOLED:
        for start in range(0, count, MEANS):
            index = start + tl.arange(0, MEANS)
            there = index < count
            at = (group * count + index) * D
            mean = tl.load(mean_keys + at[None, :] + columns[:, None], mask=there[None, :], other=0.0)
            scores = tl.dot(wide, mean) * scale + tl.load(sizes + index, mask=there, other=0.0)[None, :]
            taken = tl.load(kept + row * count + index, mask=there, other=1)
            scores = tl.where((taken != 0)[None, :], float("-inf"), scores - left_out[:, None])
            mean = tl.load(mean_values + at[:, None] + columns[None, :], mask=there[:, None], other=0.0)
            acc, total, largest = _add(acc, total, largest, scores, mean)
    row_out = (sample.to(tl.int64) * queries + rows) * heads + head
    result = acc / total[:, None]
    if SLOPED:
        slope = tl.load(slopes + (row.to(tl.int64) * D + columns)[:, None] * D + columns[None, :])
        result += tl.dot(wide, slope) * (1.0 - read * tl.exp2(before - largest) / total)[:, None]
    result = result.to(out.dtype.element_ty)
    tl.store(out + row_out[:, None] * D + columns[None, :], result, mask=inside[:, None])
    found = (largest + tl.log2(total) + left_out) * 0.6931471805599453
    tl.store(lse + group * queries + rows, found, mask=inside)


def round_keys(k: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """k [B, S, H, D] minus mean [B, 1, H, D] in INT8, [B, H, S, D], and float32 scales [B, H, S]."""
    batch, tokens, heads, dim = k.shape
    out = torch.empty((batch, heads, tokens, dim), dtype=torch.int8, device=k.device)
    units = torch.empty((batch, heads, tokens), dtype=torch.float32, device=k.device)
    with on_device_of(k):
        _round_kernel[(triton.cdiv(tokens, ROWS), heads, batch)](
            k, mean.float().contiguous(), out, units, tokens, *k.stride()[:3], D=dim, ROWS=ROWS, num_warps=4
        )
    return out, units


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    centre: Tensor | None = None,
    blocks: Tensor | None = None,
    counts: Tensor | None = None,
    block: int = 128,
    pooled: Pooled | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, L, H, D], k and v [B, S, H, D], any strides with D contiguous -> [B, L, H, D] contiguous and log-sum-exp
    float32 [B, H, L].

    centre: the keys' mean [B, 1, H, D]; with it queries and keys are rounded to INT8. blocks, counts: as `Route`, the
    blocks of `block` keys that each block of queries reads; None: all keys. pooled: what replaces blocks that are not
    read. tile: sizes; None: of the table.
    """
    batch, queries, heads, dim = q.shape
    keys, out = k.shape[1], torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    units, k_strides = lse, k.stride()[:3]  # lse: in place of what the kernel never reads
    tile = tile or tile_for(capability(q.device), "bf16" if centre is None else "int8")
    if centre is not None:
        k, units = round_keys(k, centre)
        k_strides = k.stride(0), k.stride(2), k.stride(1)
    rows, columns = (tile.queries, tile.keys) if blocks is None else (min(tile.queries, block), min(tile.keys, block))
    replacing = (lse, lse, lse, lse, lse)  # means of keys and values, sizes of the blocks, which are read, slopes
    if pooled is not None:
        means = (x.to(q.dtype).contiguous() for x in (pooled.keys, pooled.values))
        replacing = (*means, sizes_of(pooled, q, block).log2(), pooled.kept.to(torch.uint8).contiguous())
        replacing = (*replacing, lse if pooled.slopes is None else pooled.slopes.to(q.dtype).contiguous())
    with on_device_of(q):
        _attention_kernel[(triton.cdiv(queries, rows), heads, batch)](
            q, k, v, units, lse if centre is None else centre.float().contiguous(),
            lse if blocks is None else blocks.contiguous(), lse if counts is None else counts.contiguous(),
            *replacing, out, lse,
            queries, keys, triton.cdiv(queries, block), 0 if blocks is None else blocks.shape[-1],
            0 if pooled is None else pooled.keys.shape[2], dim**-0.5 * LOG2E,
            *q.stride()[:3], *k_strides, *v.stride()[:3],
            INT8=centre is not None, SPARSE=blocks is not None, COUNTS=counts is not None, POOLED=pooled is not None,
            PARTIAL=keys % (columns if blocks is None else block) != 0, BLOCK=block, M=rows, N=columns, D=dim,
            MEANS=MEANS, SLOPED=pooled is not None and pooled.slopes is not None,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out, lse

"""Attention with queries and keys in INT8, probabilities and values in FP8, in Triton, for cards with FP8 units.

A score is the product of two INT8 rows, so it has a hundredth of the error that E4M3's three bits give it; what
probabilities and values lose in E4M3 is averaged over the keys. Queries and keys are multiplied by a Hadamard matrix
first, the keys' mean removed (as in `wan_core.ops.attention.fp8`). Each row of queries has a scale, and each tile of
keys one, which the softmax's own multiplication applies. Source of the split of formats: SageAttention2,
arXiv:2411.10958.

Values are read from memory [B, H, D, S], because Hopper multiplies FP8 only along contiguous memory. Products of a tile
are summed in float32 outside the matrix unit, whose own sums keep 14 bits.

Legend: B batch, L query tokens, S key tokens rounded up to whole tiles, H heads, D head dim, n tiles of keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wan_core.ops.cards import capability
from wan_core.ops.kernels.attention_tiles import Tile, tile_for
from wan_core.ops.kernels.block_layout import padded
from wan_core.ops.kernels.blocked import quantize_values
from wan_core.ops.kernels.reference import hadamard_heads, head_signs
from wan_core.ops.kernels.triton_ops import on_device_of

LOG2E = 1.4426950408889634
ROWS = 64  # tokens that one program rounds, where each has a scale of its own


@triton.jit
def _round_kernel(
    x, signs, mean, out, units, tokens, size, parts, sample_stride, token_stride, head_stride,
    CENTRE: tl.constexpr, EACH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """x [B, L, H, D] times signs [D, D], minus mean [B, H, D], as INT8 [B, H, size, D] with scales for each token
    [B, H, size] (EACH), or for each `ROWS` of them [B, H, parts]. Zeros after the tokens."""
    part, head, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = (sample * tl.num_programs(1) + head).to(tl.int64)
    rows, columns = part.to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    inside = (rows < tokens)[:, None]
    at = x + sample.to(tl.int64) * sample_stride + head.to(tl.int64) * head_stride
    values = tl.load(at + rows[:, None] * token_stride + columns[None, :], mask=inside, other=0.0)
    mixed = tl.dot(values, tl.load(signs + columns[:, None] * D + columns[None, :])) * (D**-0.5)
    if CENTRE:
        mixed = tl.where(inside, mixed - tl.load(mean + group * D + columns)[None, :], 0.0)
    largest = tl.max(tl.abs(mixed), 1)
    if EACH:
        unit = tl.maximum(largest, 1e-12) / 127.0
        tl.store(units + group * size + rows, unit)
        data = mixed / unit[:, None]
    else:
        one = tl.maximum(tl.max(largest, 0), 1e-12) / 127.0
        tl.store(units + group * parts + part, one)
        data = mixed / one
    tl.store(out + (group * size + rows)[:, None] * D + columns[None, :], tl.floor(data + 0.5).to(tl.int8))


@triton.jit
def _step(
    acc, total, largest, query, factor, key_at, unit_at, value_at, left, size,
    MASKED: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """The running sums with a tile of keys and values, of which `left` are there."""
    rows, columns = tl.arange(0, N), tl.arange(0, D)
    keys = tl.load(key_at + rows[None, :] * D + columns[:, None])
    products = tl.dot(query, keys, out_dtype=tl.int32).to(tl.float32)
    if MASKED:
        products = tl.where((rows < left)[None, :], products, float("-inf"))
    unit = factor * tl.load(unit_at)
    above = tl.maximum(largest, tl.max(products, 1) * unit)
    # The largest probability of a row becomes 256: far below it there are digits left.
    shares = tl.exp2(products * unit[:, None] - (above - 8.0)[:, None])
    fade = tl.exp2(largest - above)
    values = tl.load(value_at + columns[None, :].to(tl.int64) * size + rows[:, None])
    acc = acc * fade[:, None] + tl.dot(shares.to(values.dtype), values)
    return acc, total * fade + tl.sum(shares, 1), above


@triton.jit
def _attention_kernel(
    q, k, v, q_units, k_units, v_scale, out, lse, queries, q_size, keys, size, parts, scale,
    PARTIAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """q INT8 [B, H, q_size, D], k [B, H, S, D], v FP8 [B, H, D, size] -> out [B, L, H, D], lse [B, H, L]."""
    part, head, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, group = tl.num_programs(1), (sample * tl.num_programs(1) + head).to(tl.int64)
    rows, columns = part * M + tl.arange(0, M), tl.arange(0, D)
    query = tl.load(q + (group * q_size + rows)[:, None] * D + columns[None, :])
    factor = tl.load(q_units + group * q_size + rows) * scale
    acc = tl.zeros((M, D), tl.float32)
    total = tl.zeros((M,), tl.float32)
    largest = tl.full((M,), float("-inf"), tl.float32)
    k_at, v_at, unit_at = k + group * parts * N * D, v + group * D * size, k_units + group * parts
    full = keys // N * N
    for _ in range(0, full, N):
        acc, total, largest = _step(acc, total, largest, query, factor, k_at, unit_at, v_at, N, size, False, N, D)
        k_at += N * D
        v_at += N
        unit_at += 1
    if PARTIAL:
        acc, total, largest = _step(
            acc, total, largest, query, factor, k_at, unit_at, v_at, keys - full, size, True, N, D
        )
    inside = rows < queries
    result = acc * (tl.load(v_scale) / total)[:, None]
    row_out = (sample.to(tl.int64) * queries + rows) * heads + head
    tl.store(out + row_out[:, None] * D + columns[None, :], result.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + group * queries + rows, (largest - 8.0 + tl.log2(total)) * 0.6931471805599453, mask=inside)


def round_heads(x: Tensor, multiple: int, mean: Tensor | None, rows: int, *, each: bool) -> tuple[Tensor, Tensor]:
    """x [B, L, H, D], less `mean` [B, 1, H, D], times the Hadamard matrix in INT8: [B, H, S, D], S a multiple of
    `multiple`, and float32 scales for each token [B, H, S], or for each `rows` of them [B, H, S / rows]."""
    batch, tokens, heads, dim = x.shape
    size = padded(tokens, multiple)
    out = torch.empty((batch, heads, size, dim), dtype=torch.int8, device=x.device)
    units = torch.empty((batch, heads, size if each else size // rows), dtype=torch.float32, device=x.device)
    centre = units if mean is None else hadamard_heads(mean.float()).expand(batch, 1, heads, dim).contiguous()
    with on_device_of(x):
        _round_kernel[(size // rows, heads, batch)](
            x, head_signs(dim, x.device, x.dtype), centre, out, units, tokens, size, size // rows, *x.stride()[:3],
            CENTRE=mean is not None, EACH=each, D=dim, ROWS=rows, num_warps=4,
        )  # fmt: skip
    return out, units


def attention(q: Tensor, k: Tensor, v: Tensor, mean: Tensor, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """q [B, L, H, D], k and v [B, S, H, D], any strides with D contiguous -> [B, L, H, D] contiguous and log-sum-exp
    float32 [B, H, L] of the scores without the keys' `mean` [B, 1, H, D], which is removed. tile: sizes; None: of the
    table."""
    batch, queries, heads, dim = q.shape
    keys, out = k.shape[1], torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    tile = tile or tile_for(capability(q.device), "8bit")
    queried, q_units = round_heads(q, max(tile.queries, ROWS), None, ROWS, each=True)
    rounded, k_units = round_heads(k, tile.keys, mean, tile.keys, each=False)
    values = quantize_values(v.flatten(-2), heads, tile.keys)
    with on_device_of(q):
        _attention_kernel[(triton.cdiv(queries, tile.queries), heads, batch)](
            queried, rounded, values.memory, q_units, k_units, values.scale, out, lse,
            queries, queried.shape[2], keys, values.memory.shape[3], k_units.shape[2], dim**-0.5 * LOG2E,
            PARTIAL=keys % tile.keys != 0, M=tile.queries, N=tile.keys, D=dim,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out, lse

"""Sparse attention in the place of a model's own: blocks of keys are chosen and read, unselected ones are replaced by
their means and slopes.

A `SparseForward` says what one forward of the model reads. It comes with every call of attention (`AttentionCall`),
as does the layer.

Legend: B batch, L tokens, H heads, D head dim, n blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from wan_core.ops.attention.fp8 import key_mean
from wan_core.ops.attention.protocol import SINGLE, Attention, AttentionCall, SparseState, empty_like_heads
from wan_core.ops.attention.sparse.kernels import SparseKernel
from wan_core.ops.attention.sparse.routing import KeyMeans, Route, Rule, choose, expected_error
from wan_core.ops.attention.sparse.slopes import Keys, slope_weights, slopes
from wan_core.ops.attention.tiles import Tiles
from wan_core.ops.kernels.block_layout import Blocked, Pooled, block_sizes, channels_first, heads_first
from wan_core.ops.kernels.blocked import final_lse, finish, pool, quantize_heads_first, quantize_values
from wan_core.ops.kernels.formats import FP8, FP8_MAX, Quantized

Fp8 = Quantized | Blocked


@dataclass
class SparseForward(SparseState):
    """One forward of a model. rule: what its layers read."""

    kernel: SparseKernel
    dense: Sequence[Attention]
    tiles: Tiles
    rule: Rule
    slope: bool = True

    @property
    def others(self) -> slice | None:
        """Tokens that a family adds to the video's: last in the order, they read all keys. None: there are none."""
        video = prod(self.tiles.grid)
        return slice(video, None) if len(self.tiles.order) > video else None

    def attend(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, L, H, D] -> contiguous [B, L, H, D]."""
        layer, block = call.layer, self.block
        if not q.numel():  # of fewer heads than devices, some have none
            return empty_like_heads(q)
        if self.kernel.fp8:  # where q, k and v do not come in FP8: behind an exchange of tokens between devices
            values = quantize_values(v.flatten(-2), v.shape[2], block)
            keys = quantize_heads_first(k, block, key_mean(k))
            out = self._fp8(quantize_heads_first(q, block), keys, values)
            out = out.to(q.dtype) * values.scale.to(q.dtype)
        else:
            out, lse, pooled = self._read(q, k, v)
            out = finish(out, lse, q, block, pooled=pooled)
        if self.others is not None:
            out[:, self.others] = self.dense[layer](q[:, self.others], k, v)
        return out

    def attend_lse(self, call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """What `attend` gives, and the log-sum-exp float32 [B, H, L] of all keys, those that means replace included."""
        assert self.others is None, "the log-sum-exp of tokens beside the video's is not computed"
        block = self.block
        if not q.numel():
            return empty_like_heads(q), q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
        if not self.kernel.fp8:
            out, lse, pooled = self._read(q, k, v)
            total = final_lse(lse, q, block, pooled=pooled)
            out = finish(out, lse, q, block, pooled=pooled)
            return out, total
        mean, values = key_mean(k), quantize_values(v.flatten(-2), v.shape[2], block)
        queries, keys = quantize_heads_first(q, block), quantize_heads_first(k, block, mean)
        out, lse, how = self._read_fp8(queries, keys, values)
        taken = (q * mean).sum(-1, dtype=torch.float32) * q.shape[-1] ** -0.5  # [B, L, H]: of the mean that was removed
        total = final_lse(lse, queries.data, block, **how) + taken.transpose(1, 2)
        out = finish(out, lse, queries.data, block, **how, scale=values.scale)
        return out.to(q.dtype) * values.scale.to(q.dtype), total

    def _read(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Pooled]:
        """What the kernel gives for plain numbers, its log-sum-exp, and the means that `finish` adds."""
        block = self.block
        means, queries = self.known(k, v), pool(q, block)[0]
        route = self.route(queries, means)
        pooled = self.replacing(route, queries, means, k, v)
        return *self.kernel.load()(q, k, v, route, block), pooled

    def attend_fp8(self, call: AttentionCall, q: Fp8, k: Fp8, v: Fp8) -> Tensor:
        """FP8 [B, L, H, D] in units of v's scale."""
        if not q.data.numel():
            return empty_like_heads(q.data)
        out, others = self._fp8(q, k, v), self.others
        if others is not None:
            queries, keys, values = Quantized(q.data[:, others], q.scale), *(Quantized(x.data, x.scale) for x in (k, v))
            out[:, others] = self.dense[call.layer].quantized(queries, keys, values).data
        return out

    def _fp8(self, q: Fp8, k: Fp8, v: Fp8) -> Tensor:
        # An exchange of tokens between devices gives them as they arrived, in no blocks.
        q, k = (x if isinstance(x, Blocked) else heads_first(x, self.block) for x in (q, k))
        v = v if isinstance(v, Blocked) else channels_first(v, self.block)
        out, lse, how = self._read_fp8(q, k, v)
        return finish(out, lse, q.data, self.block, **how, scale=v.scale)

    def _read_fp8(self, q: Blocked, k: Blocked, v: Blocked) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """What the kernel gives for FP8, its log-sum-exp, and how `finish` corrects them."""
        block, tokens = self.block, q.tokens
        means, queries = self.known(k, v), pool(q.data, block, q.scale)[0]
        route = self.route(queries, means)
        out, lse = self.kernel.load()(q, k, v, route, block)
        pads = -tokens % block
        pooled = self.replacing(route, queries, means, k, v)
        tail = pooled.kept[..., self.tiles.blocks - 1] if pads else None
        return out, lse, {"q_scale": q.scale, "pads": pads, "tail": tail, "pooled": pooled}

    def known(self, k: Keys, v: Keys) -> KeyMeans:
        """What choice and replacement need of all keys and values."""
        pools = (*block_means(k, self.block), *block_means(v, self.block))  # [B, H, n, D]
        return KeyMeans(*pools, block_sizes(len(self.tiles.order), self.block, pools[0].device))

    def replacing(self, route: Route, queries: Tensor, known: KeyMeans, k: Keys, v: Keys) -> Pooled:
        """What replaces the blocks that `route` leaves out. queries: means [B, H, n, D]."""
        selected = route.kept(self.tiles.blocks)
        if not self.slope:
            return known.pooled(selected)
        weights = slope_weights(queries, known, selected)
        return known.pooled(selected, slopes(weights, known.keys, k, v, self.block))

    def route(self, queries: Tensor, known: KeyMeans) -> Route:
        """The blocks to read, from means of queries, float32 [B, H, n, D]."""
        return choose(expected_error(queries, known), self.rule, self.tiles.forced, known.sizes)


class SparseAttention(Attention):
    """In the place of the attention of every layer, one object for all: reads what `call.sparse` says."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> Tensor:
        return state_of(call).attend(call, q, k, v)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> tuple[Tensor, Tensor]:
        return state_of(call).attend_lse(call, q, k, v)


class SparseFp8Attention(SparseAttention):
    """Takes q, k and v in FP8, in memory by heads and whole blocks (`block`)."""

    takes_fp8 = True

    def __init__(self, block: int) -> None:
        self.block = block

    def quantized(self, q: Fp8, k: Fp8, v: Fp8, call: AttentionCall = SINGLE) -> Quantized:
        return Quantized(state_of(call).attend_fp8(call, q, k, v), v.scale)


class SparseBehindFp8(SparseAttention):
    """Behind an exchange of FP8 between devices, where the sparse kernel takes no FP8: dequantises what arrives, and
    gives FP8 back in units of v's scale."""

    takes_fp8 = True

    def quantized(self, q: Quantized, k: Quantized, v: Quantized, call: AttentionCall = SINGLE) -> Quantized:
        wide = torch.bfloat16 if q.data.is_cuda else torch.float32
        queries, keys, values = (x.dequantize(wide) for x in (q, k, v))
        out = self(queries, keys, values, call).float()
        return Quantized((out / v.scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8), v.scale)


def state_of(call: AttentionCall) -> SparseForward:
    assert isinstance(call.sparse, SparseForward), "sparse attention was called without a sparse forward"
    return call.sparse


def block_means(x: Keys, block: int) -> tuple[Tensor, Tensor]:
    """Means and variances of blocks, float32 [B, H, n, D], by `pool`."""
    return pool(x, block) if isinstance(x, Tensor) else pool(x.data, block, x.scale)

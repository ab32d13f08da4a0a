"""Sparse attention in the place of a model's own, for one forward: blocks are chosen, read, and the rest stands in by
its means.

Compiled blocks are the same code for all layers, so that what differs between layers cannot be an argument of it. The
operators below are one call each to a compiler, and find what belongs to the forward that is going on, `Forward`, in
`running`; layers are told apart by counting calls.

Legend: B batch, L tokens, H heads, D head dim, n blocks, r blocks of a rank's queries.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wan_core.ops.attention.fp8 import key_mean
from wan_core.ops.attention.registry import Attend
from wan_core.ops.attention.sparse.kernels import SparseKernel
from wan_core.ops.attention.sparse.ring import Numbers, Ring, block_means, read_around, ring_blocks, widened
from wan_core.ops.attention.sparse.routing import Route, Rule, choose, estimate, over_rows
from wan_core.ops.attention.sparse.tiles import Tiles
from wan_core.ops.custom_ops import operator, shapes_of
from wan_core.ops.kernels.blocked import (
    Pooled,
    block_sizes,
    channels_first,
    finish,
    heads_first,
    pool,
    quantize_heads_first,
    quantize_values,
    whole,
)
from wan_core.ops.kernels.formats import FP8, FP8_MAX, Quantized

Observer = Callable[[int, Tensor, Tensor, Tensor, Tiles], None]
"""(layer, q, k, v [B, L, H, D] in the order of the tiles, tiles)"""


@dataclass
class Forward:
    """One forward of a model: `rules` of its layers (None: dense), and where routes are kept for later steps.

    routes: (branches, layer) -> the step and the rule it was made for, and the route; used again by the same rule, up
    to `reuse` - 1 steps later.
    """

    kernel: SparseKernel
    dense: Sequence[Attend]
    tiles: Tiles
    rules: Sequence[Rule | None]
    pooled: bool = True
    step: int = 0
    branches: Hashable = None
    reuse: int = 1
    routes: dict[Any, tuple[int, Rule, Route]] = field(default_factory=dict)
    observe: Observer | None = None
    layer: int = 0

    def next_rule(self) -> tuple[int, Rule | None]:
        layer, self.layer = self.layer, self.layer + 1
        return layer, self.rules[layer]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, L, H, D] -> contiguous [B, L, H, D]."""
        layer, rule = self.next_rule()
        if not q.numel():  # of fewer heads than devices, some have none
            return torch.empty_like(q, memory_format=torch.contiguous_format)
        if self.observe is not None:
            self.observe(layer, q, k, v, self.tiles)
        if rule is None:
            return self.dense[layer](q, k, v).contiguous()
        block = self.tiles.block
        if self.kernel.fp8:
            return self._attend_fp8_of(layer, rule, q, k, v)
        pools = pool(q, block)[0], *pool(k, block)
        route = self.route(layer, rule, *pools)
        out, lse = self.kernel.load()(q, k, v, route, block)
        pooled = Pooled(pools[1], pool(v, block)[0], route.kept(self.tiles.blocks)) if self.pooled else None
        return finish(out, lse, q, block, pooled=pooled)

    def _attend_fp8_of(self, layer: int, rule: Rule, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `attend`, where q, k and v do not come in FP8: behind what moved tokens between devices."""
        block = self.tiles.block
        values = quantize_values(v.flatten(-2), v.shape[2], block)
        keys = quantize_heads_first(k, block, key_mean(k))
        out = self._fp8(layer, rule, quantize_heads_first(q, block), keys, values)
        return out.to(q.dtype) * values.scale.to(q.dtype)

    def attend_fp8(self, q: Quantized, k: Quantized, v: Quantized) -> Tensor:
        """FP8 [B, L, H, D] in units of v's scale."""
        layer, rule = self.next_rule()
        if not q.data.numel():
            return torch.empty_like(q.data, memory_format=torch.contiguous_format)
        if rule is None:
            dense: Any = self.dense[layer]
            return dense.quantized(q, k, v).data.contiguous()
        return self._fp8(layer, rule, q, k, v)

    def _fp8(self, layer: int, rule: Rule, q: Quantized, k: Quantized, v: Quantized) -> Tensor:
        block, tokens = self.tiles.block, q.data.shape[1]
        # What moved tokens between devices gives them as they arrived.
        q, k = (
            x if whole(x.data, block) is not None else Quantized(heads_first(x.data, block), x.scale) for x in (q, k)
        )
        v = v if whole(v.data, block) is not None else Quantized(channels_first(v.data, block), v.scale)
        pools = pool(q.data, block, q.scale)[0], *pool(k.data, block, k.scale)
        route = self.route(layer, rule, *pools)
        out, lse = self.kernel.load()(q, k, v, route, block)
        pads = -tokens % block
        pooled = tail = None
        if self.pooled:
            pooled = Pooled(pools[1], pool(v.data, block, v.scale)[0], route.kept(self.tiles.blocks))
        if pads:
            last = self.tiles.blocks - 1
            tail = pooled.kept[..., last] if pooled else (route.blocks == last).any(-1)
        return finish(out, lse, q.data, block, q_scale=q.scale, pads=pads, tail=tail, pooled=pooled, scale=v.scale)

    def over_ring(self, layer: int, rule: Rule, q: Numbers, k: Numbers, v: Numbers, ring: Ring) -> Tensor:
        """As `attend` where ranks of a ring have whole blocks of the tokens each: q, k and v [B, N, H, D] are those of
        this rank -> contiguous [B, N, H, D], wide where they are in FP8.

        Means of all blocks are gathered, a hundredth of the keys and values: choice and rest are as on one device."""
        block, mine = self.tiles.block, widened(q if isinstance(q, Tensor) else q.data, q)
        values = [block_means(v, block)[0]] if self.pooled else []
        means = torch.stack([*block_means(k, block), *values])  # [2 or 3, B, H, r, D]
        keys, variance, *values = ring.gather(means, ring_blocks(ring, block), 3).unbind()
        route = self.route(layer, rule, block_means(q, block)[0], keys, variance, ring)
        out, lse = read_around(self.kernel.load(), mine, k, v, route, block, ring)
        sizes = block_sizes(len(self.tiles.order), block, out.device)
        pooled = Pooled(keys, values[0], route.kept(self.tiles.blocks), sizes) if self.pooled else None
        return finish(out, lse, mine, block, pooled=pooled)

    def route(
        self, layer: int, rule: Rule, queries: Tensor, keys: Tensor, variance: Tensor, ring: Ring | None = None
    ) -> Route:
        """The blocks to read, from means of queries, float32 [B, H, r, D], and of keys and the keys' variances,
        [B, H, n, D]. ring: of whose queries these are this rank's; r is n where there is none."""
        key = self.branches, layer
        if key in self.routes:
            step, made_by, found = self.routes[key]
            if made_by == rule and self.step - step < self.reuse:
                return found
        sizes = block_sizes(len(self.tiles.order), self.tiles.block, queries.device)
        forced, average = self.tiles.forced, over_rows
        if ring is not None:
            rows = ring_blocks(ring, self.tiles.block)
            first = sum(rows[: ring.index])
            forced, average = forced[first : first + rows[ring.index]], partial(_over_ranks, ring)
        found = choose(estimate(queries, keys, variance, sizes, rule.score), rule, forced, sizes, average)
        if self.reuse > 1:
            self.routes[key] = self.step, rule, found
        return found


def _over_ranks(ring: Ring, share: Tensor) -> Tensor:
    """The mean of [B, H, r, n] over the rows of all ranks: [B, H, 1, n]. Every rank adds in the same order."""
    sums = ring.gather(share.sum(2, keepdim=True), [1] * len(ring.lengths), 2)
    return sums.sum(2, keepdim=True) / share.shape[-1]  # as many rows in all as columns


running: ContextVar[Forward | None] = ContextVar("running", default=None)


@contextmanager
def forward(state: Forward) -> Iterator[Forward]:
    """Let `state` be the forward that is going on."""
    token = running.set(state)
    try:
        yield state
    finally:
        running.reset(token)


def _state() -> Forward:
    state = running.get()
    assert state is not None, "sparse attention outside of a sparse forward"
    return state


@operator("sparse_attention")
def sparse_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, L, H, D] -> contiguous [B, L, H, D]."""
    return _state().attend(q, k, v)


@shapes_of(sparse_attention)
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape)


@operator("sparse_attention_fp8")
def sparse_attention_fp8(q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor) -> Tensor:
    """FP8 data and scales [1] -> contiguous FP8 [B, L, H, D] in units of v's scale."""
    return _state().attend_fp8(Quantized(q, q_scale), Quantized(k, k_scale), Quantized(v, v_scale))


@shapes_of(sparse_attention_fp8)
def _(q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor) -> Tensor:
    return q.new_empty(q.shape)


class SparseAttention:
    """In the place of `SelfAttention.attend` of every layer, one object for all."""

    capturable = False  # what it does depends on the step

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v)

    def over_ring(self, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        """[B, N, H, D] of this rank's tokens, as they come out of an exchange of heads -> the same."""
        state = _state()
        layer, rule = state.next_rule()
        if rule is None or not q.numel():  # of fewer heads than devices, some have none, all around a ring
            return ring.attend(q, k, v)
        return state.over_ring(layer, rule, q, k, v, ring)


class SparseFp8Attention(SparseAttention):
    """Takes q, k and v in FP8, in memory by heads and whole blocks (`block`)."""

    def __init__(self, block: int) -> None:
        self.block = block

    def quantized(self, q: Quantized, k: Quantized, v: Quantized) -> Quantized:
        return Quantized(sparse_attention_fp8(q.data, k.data, v.data, q.scale, k.scale, v.scale), v.scale)


class SparseBehindFp8(SparseAttention):
    """Behind what exchanges FP8 between devices, where the kernel is none of FP8: widens what arrives, and gives FP8
    back in units of v's scale."""

    def quantized(self, q: Quantized, k: Quantized, v: Quantized) -> Quantized:
        wide = torch.bfloat16 if q.data.is_cuda else torch.float32
        return _narrow(sparse_attention(*(x.dequantize(wide) for x in (q, k, v))), v.scale)

    def quantized_over_ring(self, q: Quantized, k: Quantized, v: Quantized, ring: Ring) -> Quantized:
        """As `over_ring`: FP8 goes around as it is."""
        state = _state()
        layer, rule = state.next_rule()
        if rule is None or not q.data.numel():
            return Quantized(ring.attend(q.data, k.data, v.data), v.scale)
        return _narrow(state.over_ring(layer, rule, q, k, v, ring), v.scale)


def _narrow(out: Tensor, scale: Tensor) -> Quantized:
    return Quantized((out.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale)

"""Sparse attention in the place of a model's own, for one forward: blocks are chosen, read, and the rest stands in by
its means.

Compiled blocks are the same code for all layers, so that what differs between layers cannot be an argument of it. The
operators below are one call each to a compiler, and find what belongs to the forward that is going on, `Forward`, in
`running`; layers are told apart by counting calls.

Legend: B batch, L tokens, H heads, D head dim, n blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wan_core.attention.fp8 import key_mean
from wan_core.attention.registry import Attend
from wan_core.attention.sparse.kernels import SparseKernel
from wan_core.attention.sparse.routing import Route, Rule, choose, estimate
from wan_core.attention.sparse.tiles import Tiles
from wan_core.kernels.blocked import (
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
from wan_core.kernels.formats import FP8, FP8_MAX, Quantized

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

    def route(self, layer: int, rule: Rule, queries: Tensor, keys: Tensor, variance: Tensor) -> Route:
        """The blocks to read, from means of queries and keys and the keys' variances, float32 [B, H, n, D].

        Where keys are spread over devices (a ring), this is where their means would be gathered."""
        key = self.branches, layer
        if key in self.routes:
            step, made_by, found = self.routes[key]
            if made_by == rule and self.step - step < self.reuse:
                return found
        sizes = block_sizes(len(self.tiles.order), self.tiles.block, queries.device)
        found = choose(estimate(queries, keys, variance, sizes, rule.score), rule, self.tiles.forced, sizes)
        if self.reuse > 1:
            self.routes[key] = self.step, rule, found
        return found


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


@torch.library.custom_op("wancore::sparse_attention", mutates_args=())
def sparse_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, L, H, D] -> contiguous [B, L, H, D]."""
    return _state().attend(q, k, v)


@sparse_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.custom_op("wancore::sparse_attention_fp8", mutates_args=())
def sparse_attention_fp8(q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor) -> Tensor:
    """FP8 data and scales [1] -> contiguous FP8 [B, L, H, D] in units of v's scale."""
    return _state().attend_fp8(Quantized(q, q_scale), Quantized(k, k_scale), Quantized(v, v_scale))


@sparse_attention_fp8.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor) -> Tensor:
    return q.new_empty(q.shape)


class SparseAttention:
    """In the place of `SelfAttention.attend` of every layer, one object for all."""

    capturable = False  # what it does depends on the step

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v)


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
        out = sparse_attention(*(x.dequantize(wide) for x in (q, k, v)))
        return Quantized((out.float() / v.scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8), v.scale)

"""Sparse attention where a model attends frame by frame: Animate-2's generation.

Each frame's queries attend to all tokens of the video, and to one frame of the pose video, which is another one for
each call. The video's keys and values are the same for all frames of a layer: they are put into tiles once.

Legend: B batch, Q tokens of a frame, S tokens of the video and of a pose frame, H heads, D head dim, n blocks of keys,
r blocks of queries.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from wan_core.ops.attention.sparse.kernels import SparseKernel
from wan_core.ops.attention.sparse.routing import KeyMeans, Rule, choose, expected_error
from wan_core.ops.attention.sparse.slopes import Covariances, slope_weights, slopes
from wan_core.ops.attention.tiles import Tiles, make_tiles, with_extra
from wan_core.ops.kernels.block_layout import block_sizes
from wan_core.ops.kernels.blocked import finish, pool

Pools = list[Tensor]
"""Means and variances of keys, means and variances of values, float32 [B, H, n, D] each."""


@dataclass
class FrameKeys:
    """Keys and values of a layer in tiles, [B, S, H, D] with room for the pose's, and the pools of their full blocks.

    covariances: of these, where slopes need them. frame: of the next queries.
    """

    layer: int
    tiles: Tiles
    keys: Tensor
    values: Tensor
    pools: Pools  # of full blocks
    covariances: Covariances | None
    frame: int = 0

    @classmethod
    def of(cls, layer: int, tiles: Tiles, k: Tensor, v: Tensor, slope: bool) -> FrameKeys:
        """k, v [B, L, H, D] of the video alone."""
        video, full = k.shape[1], k.shape[1] // tiles.block * tiles.block
        room = video + video // tiles.grid[0]
        keys, values = (x.new_empty(x.shape[0], room, *x.shape[2:]) for x in (k, v))
        keys[:, :video], values[:, :video] = k[:, tiles.order], v[:, tiles.order]
        whole = keys[:, :full], values[:, :full]
        pools = _pools(*whole, tiles.block)
        return cls(layer, tiles, keys, values, pools, Covariances(pools[0], *whole, tiles.block) if slope else None)

    def read(self, q: Tensor, k: Tensor, v: Tensor, rule: Rule, kernel: SparseKernel) -> Tensor:
        """Attention of the next frame's q [B, Q, H, D] to k, v [B, S, H, D] -> [B, Q, H, D]."""
        video, length, block = len(self.tiles.order), k.shape[1], self.tiles.block
        self.keys[:, video:length], self.values[:, video:length] = k[:, video:], v[:, video:]
        keys, values = self.keys[:, :length], self.values[:, :length]
        tiles = self.tiles if length == video else with_extra(self.tiles, 0, length)
        queries = make_tiles((1, *self.tiles.grid[1:]), block, q.device)
        full = video // block * block
        pools = self.pools
        if full < length:
            after = _pools(keys[:, full:], values[:, full:], block)
            pools = [torch.cat(pair, 2) for pair in zip(pools, after, strict=True)]
        ordered, sizes = q[:, queries.order], block_sizes(length, block, q.device)
        keys_of_blocks, variance, values_of_blocks, scatter = pools
        key_means = KeyMeans(keys_of_blocks, variance, values_of_blocks, scatter, sizes)
        rows = pool(ordered, block)[0]
        route = choose(expected_error(rows, key_means), rule, nearest_forced(queries, tiles, self.frame), sizes)
        self.frame += 1
        out, lse = kernel.load()(ordered, keys, values, route, block)
        selected, slope_sum = route.kept(tiles.blocks), None
        if self.covariances is not None:
            weights, before = slope_weights(rows, key_means, selected), full // block
            behind = key_means.keys[:, :, before:], keys[:, full:], values[:, full:]
            slope_sum = slopes(weights[..., before:], *behind, block)
            self.covariances.add_to(slope_sum, weights[..., :before])
        means = key_means.pooled(selected, slope_sum)
        return finish(out, lse, ordered, block, pooled=means)[:, queries.inverse]


@functools.lru_cache(maxsize=128)
def nearest_forced(queries: Tiles, keys: Tiles, frame: int) -> Tensor:
    """bool [r, n]: for each block of the queries of `frame`, what the block of keys with most of its tokens reads."""
    count = len(queries.order)
    of = keys.inverse[queries.order + frame * count] // keys.block
    rows = torch.arange(count, device=of.device) // queries.block
    votes = torch.zeros(queries.blocks, keys.blocks, device=of.device)
    votes.index_put_((rows, of), torch.ones(count, device=of.device), accumulate=True)
    return keys.forced[votes.argmax(-1)]


def _pools(keys: Tensor, values: Tensor, block: int) -> Pools:
    return [*pool(keys, block), *pool(values, block)]

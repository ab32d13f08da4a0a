"""The order of tokens in which every block of consecutive ones is a compact piece of space and time.

The tokens of a video come frame by frame, row by row: 128 consecutive ones are a line through the picture. Here the
grid is cut in two again and again, across its longest side, at a multiple of the block's length, until pieces are
blocks. So a grid need not divide: cuts may run through the middle of a row, every block but the last is full, and no
token is added. A block of 128 comes out near 2 x 8 x 8, frames counting as four rows.

Legend: T/Y/X token frames, rows, columns; L = T * Y * X tokens; n blocks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FRAME = 4  # rows that a frame counts as: four frames of video are one of latents, and motion is small
Grid = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class Tiles:
    """An order of the tokens of `grid`, in blocks.

    order: int64 [L], the token at each place. inverse: int64 [L], the place of each token. forced: bool [n, n], blocks
    (columns) that the queries of a block (rows) always attend to: itself, and those before and after in time.
    """

    grid: Grid
    block: int
    order: Tensor
    inverse: Tensor
    forced: Tensor

    @property
    def blocks(self) -> int:
        return self.forced.shape[0]


@functools.lru_cache(maxsize=8)
def make_tiles(
    grid: Grid,
    block: int,
    device: torch.device,
    *,
    frames_apart: bool = False,
    raster: bool = False,
) -> Tiles:
    """frames_apart: keep the tokens of a frame together, for modulation that has a row for each frame. raster:
    leave tokens as they come (to compare with)."""
    T, Y, X = grid
    cells = np.stack(np.unravel_index(np.arange(T * Y * X), grid), 1)  # [L, 3]
    every = np.arange(T * Y * X)
    if raster:
        order = every
    elif frames_apart:
        order = np.concatenate([_cut(frame, cells, block) for frame in every.reshape(T, Y * X)])
    else:
        order = _cut(every, cells, block)
    inverse = np.empty_like(order)
    inverse[order] = every
    forced = _forced(inverse // block, cells, grid)
    made = [torch.from_numpy(a).to(device) for a in (order, inverse, forced)]
    return Tiles(grid, block, *made)


@functools.lru_cache(maxsize=8)
def with_extra(tiles: Tiles, front: int, length: int) -> Tiles:
    """`tiles` of a video in a sequence of `length` tokens that has `front` others before the video's and the rest
    behind. The others come last in the order; every block reads the blocks that they are in."""
    video = len(tiles.order)
    device = tiles.order.device
    others = torch.arange(length, device=device)
    others = torch.cat([others[:front], others[front + video :]])
    order = torch.cat([tiles.order + front, others])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(length, device=device)
    blocks = -(-length // tiles.block)
    forced = torch.zeros(blocks, blocks, dtype=torch.bool, device=device)
    forced[: tiles.blocks, : tiles.blocks] = tiles.forced
    forced[:, video // tiles.block :] = True
    return Tiles(tiles.grid, tiles.block, order, inverse, forced)


def _cut(tokens: np.ndarray, cells: np.ndarray, block: int) -> np.ndarray:
    """`tokens` in blocks; the one that is not full, if any, comes last."""
    blocks = -(-len(tokens) // block)
    if blocks <= 1:
        return np.sort(tokens)
    at = cells[tokens]
    sides = (at.max(0) - at.min(0) + 1) * (FRAME, 1, 1)
    last, middle, first = np.argsort(sides, kind="stable")  # lexsort: the last key counts most
    tokens = tokens[np.lexsort((at[:, last], at[:, middle], at[:, first]))]
    half = blocks // 2 * block
    return np.concatenate([_cut(some, cells, block) for some in (tokens[:half], tokens[half:])])


def _forced(block_of: np.ndarray, cells: np.ndarray, grid: Grid) -> np.ndarray:
    """bool [n, n]; block_of [L]."""
    count, volume = block_of.max() + 1, block_of.reshape(grid)
    forced = np.eye(count, dtype=bool)
    frames = cells[:, 0]
    for step in (-1, 1):
        edge = np.full(count, -1 if step > 0 else grid[0])
        (np.maximum if step > 0 else np.minimum).at(edge, block_of, frames)
        leaving = (frames == edge[block_of]) & (frames + step >= 0) & (frames + step < grid[0])
        _, y, x = cells[leaving].T
        pairs = block_of[leaving] * count + volume[frames[leaving] + step, y, x]
        codes, times = np.unique(pairs, return_counts=True)
        codes = codes[np.argsort(times, kind="stable")]  # of several neighbours the one that most tokens meet, the last
        nearest = dict(zip(codes // count, codes % count, strict=True))
        forced[list(nearest), list(nearest.values())] = True
    return forced

"""Spatial tiling: overlapping tiles of a picture, and the weights that blend their results without a seam.

Tiles lie on a grid of latent cells (8x8 pixels in Wan 2.1, 16x16 in 2.2). Along each axis they have equal size and even
distances, and overlap by at least the given number of cells. A weight falls linearly from one to zero across an
overlap, because a tile is least accurate at its border. A tile's weight is the product of its row and column weights;
at every position the weights of all tiles sum to one.

Shapes: B batch, C channels, F frames, Y/X rows and columns of latent cells, H/W of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wan_core.config import OptionError


@dataclass(frozen=True, kw_only=True)
class TileSpec:
    """Size of tiles and their least overlap, in latent cells. An axis shorter than a tile is not divided.

    Raises `OptionError` unless 0 <= overlap < height and width. At an overlap of 8 cells or more seams are hardly
    visible.
    """

    height: int = 32
    width: int = 32
    overlap: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.overlap < min(self.height, self.width):
            raise OptionError(
                f"tiles of {self.height}x{self.width} latent cells cannot overlap by {self.overlap}: the overlap must "
                f"be at least 0 and smaller than both sides; choose larger tiles or a smaller overlap"
            )


@dataclass(frozen=True, kw_only=True)
class Tile:
    """One tile: its position in latent cells and the weight of each row and column of its result, fp32 on the CPU."""

    top: int
    left: int
    height: int
    width: int
    row_weights: Tensor  # [height * scale]
    column_weights: Tensor  # [width * scale]

    def crop(self, x: Tensor, cell: int) -> Tensor:
        """The tile's part of `x` [..., Y * cell, X * cell], a view."""
        rows = slice(self.top * cell, (self.top + self.height) * cell)
        columns = slice(self.left * cell, (self.left + self.width) * cell)
        return x[..., rows, columns]

    def add_to(self, canvas: Tensor, result: Tensor, cell: int) -> None:
        """Add `result` [..., height * cell, width * cell], weighted, to the fp32 `canvas` of the whole picture."""
        rows = self.row_weights.to(canvas.device, non_blocking=True)
        columns = self.column_weights.to(canvas.device, non_blocking=True)
        self.crop(canvas, cell).add_(result * (rows[:, None] * columns))


def tile_starts(length: int, tile: int, overlap: int) -> list[int]:
    """First cells of tiles of `tile` cells over `length` cells, evenly spaced, overlapping by at least `overlap`."""
    if length <= tile:
        return [0]
    count = -(-(length - overlap) // (tile - overlap))
    return [round(i * (length - tile) / (count - 1)) for i in range(count)]


def axis_weights(starts: list[int], tile: int, length: int, scale: int) -> Tensor:
    """Weights of the tiles of one axis, fp32 [len(starts), min(tile, length) * scale]; at every position they sum to
    one.

    Linear ramps over the overlap with the neighbour, sampled at the centres of the `scale` results per cell, then
    divided by their sum, which differs from one only where three or more tiles overlap.
    """
    size = min(tile, length) * scale
    weights = torch.ones(len(starts), size, dtype=torch.float64)
    for i in range(1, len(starts)):
        shared = max(0, starts[i - 1] + tile - starts[i]) * scale
        ramp = (torch.arange(shared, dtype=torch.float64) + 0.5) / shared
        weights[i, :shared] *= ramp
        weights[i - 1, size - shared :] *= ramp.flip(0)
    total = torch.zeros(length * scale, dtype=torch.float64)
    for start, row in zip(starts, weights, strict=True):
        total[start * scale : start * scale + size] += row
    for start, row in zip(starts, weights, strict=True):
        row /= total[start * scale : start * scale + size]
    return weights.float()


def plan_tiles(rows: int, columns: int, spec: TileSpec, scale: int) -> list[Tile]:
    """The tiles of a grid of `rows` x `columns` latent cells, row by row. scale: results per cell and axis: the VAE's
    spatial stride to decode (pixels), 1 to encode (latent cells)."""
    tops, lefts = tile_starts(rows, spec.height, spec.overlap), tile_starts(columns, spec.width, spec.overlap)
    row_weights = axis_weights(tops, spec.height, rows, scale)
    column_weights = axis_weights(lefts, spec.width, columns, scale)
    size = {"height": min(spec.height, rows), "width": min(spec.width, columns)}
    return [
        Tile(top=top, left=left, **size, row_weights=row_weights[i], column_weights=column_weights[j])
        for i, top in enumerate(tops)
        for j, left in enumerate(lefts)
    ]

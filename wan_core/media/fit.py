"""Pictures fitted into a size with black bars, as the reference implementations of Animate fit them, or covering it.

Legend: H rows, W columns, n pixels of a side. The numbers are those of OpenCV's `resize`, bit for bit when it enlarges.
Source: `padding_resize` of Wan2.2/wan/animate.py; LightX2V's Animate-2 shrinks by area.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from wan_core.config.checks import check_picture_size

Pixels = NDArray[np.uint8]  # [H, W, 3]
Weights = NDArray[np.int32]
ONE = 2048  # of a weight in fixed point


class Box(NamedTuple):
    """Where the picture is in the size that it was fitted into; the rest is black."""

    left: int
    top: int
    width: int
    height: int


def fitted_box(picture: tuple[int, int], size: tuple[int, int]) -> Box:
    """picture, size: (width, height)."""
    (columns, rows), (width, height) = picture, size
    if rows / columns > height / width:
        inner = max(1, int(height / rows * columns))
        return Box((width - inner) // 2, 0, inner, height)
    inner = max(1, int(width / columns * rows))
    return Box(0, (height - inner) // 2, width, inner)


def fit_with_bars(pixels: Pixels, size: tuple[int, int], *, by_area: bool = False, bars: int = 0) -> Pixels:
    """[H, W, 3] fitted into `size` (width, height). by_area: average where it gets smaller, else interpolate always.
    bars: their grey value. Raises OptionError for a picture that is not read from a file either."""
    rows, columns = pixels.shape[:2]
    if (columns, rows) == size:
        return pixels
    check_picture_size(columns, rows)
    width, height = size
    box = fitted_box((columns, rows), size)
    average = by_area and width * height < rows * columns
    inner = (averaged if average else interpolated)(pixels, (box.width, box.height))
    canvas = np.full((height, width, 3), bars, np.uint8)
    canvas[box.top : box.top + box.height, box.left : box.left + box.width] = inner
    return canvas


def fit_covering(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """[H, W, 3] scaled (Lanczos) to cover `size` (width, height); what sticks out is cut off, as much on both sides.
    Raises OptionError as `fit_with_bars` does."""
    if pixels.shape[1::-1] == size:
        return pixels
    check_picture_size(pixels.shape[1], pixels.shape[0])
    return np.array(ImageOps.fit(Image.fromarray(pixels), size, Image.Resampling.LANCZOS))


def interpolated(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Resized to `size` (width, height) by linear interpolation between the nearest two pixels, in fixed point."""
    y0, y1, v0, v1 = _neighbours(pixels.shape[0], size[1])
    x0, x1, u0, u1 = _neighbours(pixels.shape[1], size[0])
    alone = x0 == x1  # at a side: the one pixel has all of the weight, where rows share it
    u0, u1 = np.where(alone, ONE, u0), np.where(alone, 0, u1)
    wide = pixels.astype(np.int32)
    rows = wide[:, x0] * u0[:, None] + wide[:, x1] * u1[:, None]
    upper, lower = ((v[:, None, None] * (rows[y] >> 4)) >> 16 for y, v in ((y0, v0), (y1, v1)))
    return ((upper + lower + 2) >> 2).astype(np.uint8)


def _neighbours(n: int, wanted: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Weights, Weights]:
    """For each of `wanted` pixels, the two of n that it lies between, and their weights times `ONE`."""
    position = ((np.arange(wanted) + 0.5) * (n / wanted) - 0.5).astype(np.float32)
    first = np.floor(position).astype(np.int64)
    share = (position - first).astype(np.float32)
    weights = [np.rint(part * ONE).astype(np.int32) for part in (1 - share, share)]
    return first.clip(0, n - 1), (first + 1).clip(0, n - 1), weights[0], weights[1]


def averaged(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Made smaller, to `size` (width, height): each pixel is the mean of the area that it covers."""
    columns, rows = (_shares(n, m) for n, m in zip(pixels.shape[1::-1], size, strict=True))
    means = np.einsum("yh,hwc,xw->yxc", rows, pixels, columns, optimize=True)
    return np.floor(means + 0.5).clip(0, 255).astype(np.uint8)


def _shares(n: int, wanted: int) -> NDArray[np.float64]:
    """[wanted, n]: how much of the area of each of `wanted` pixels each of n covers."""
    edges = np.arange(wanted + 1) * (n / wanted)
    covered = np.minimum(edges[1:, None], np.arange(1, n + 1)) - np.maximum(edges[:-1, None], np.arange(n))
    return covered.clip(0) * (wanted / n)

"""Queries, keys and values structured like those of trained video models: to measure what a router of blocks finds.

Random normal q and k have no structure, and no router can beat chance on them. What attention maps of video diffusion
transformers are published to show, and what is drawn here:

- locality: queries look at keys near them in space and time, each head with a reach of its own. Positions are written
  into q and k as random Fourier features, whose product falls off with distance like a Gaussian of that reach;
- sameness in time: some heads reach far in time and little in space (the same place in other frames), some the other
  way round;
- content: keys of the same object attract. The video is cut into regions that move, and heads see them with a strength
  of their own;
- heavy heads: temperatures differ between heads by a factor of up to eight, so that some are nearly uniform and others
  look at a handful of keys;
- sinks: a few keys that every query of a head looks at, wherever it is, with small values;
- peaks: a few keys of large norm among ordinary ones, which the mean of a block hides.

Values are those of the region and of the place, and as much noise again.

Legend: L tokens, H heads, D head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def structured(
    grid: tuple[int, int, int], heads: int = 16, dim: int = 64, *, seed: int = 0, sinks: int = 4, peaks: float = 0.002
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v float32 [1, L, H, D] in raster order. sinks: for each head; peaks: share of keys."""
    _, Y, X = grid
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    t, y, x = torch.meshgrid(*(torch.arange(n, dtype=torch.float32) for n in grid), indexing="ij")
    places = torch.stack([t, y, x], -1).flatten(0, 2)  # [L, 3]
    length = len(places)
    objects = _objects(grid, generator)  # [L]
    q, k, v = (torch.empty(length, heads, dim) for _ in range(3))
    for head in range(heads):
        # Reaches in frames and in tokens: from heads that see their surroundings to heads that see the whole picture.
        wide, long = (torch.rand(2, generator=generator) * torch.tensor([1.6, 1.8])).exp().tolist()
        reach = torch.tensor([long, 1.5 * wide * max(Y, X) / 16, 1.5 * wide * max(Y, X) / 16])
        half = dim // 4
        phases = places @ (normal(3, half) / reach[:, None])
        where = torch.cat([phases.cos(), phases.sin()], -1) / math.sqrt(half)  # [L, D / 2], unit length
        what = normal(int(objects.max()) + 1, dim - 2 * half)[objects]
        what = what / what.norm(dim=-1, keepdim=True)
        sharp = 1.2 * 8.0 ** torch.rand(1, generator=generator).item()  # of the scores, in natural logarithm units
        content = 0.7 * torch.rand(1, generator=generator).item()
        size = math.sqrt(sharp * math.sqrt(dim))
        shared = torch.cat([where, content * what], -1) * size
        noise = 0.35 * size / math.sqrt(dim)
        q[:, head] = shared + noise * normal(length, dim)
        k[:, head] = shared + noise * normal(length, dim)
        tall = torch.rand(length, generator=generator) < peaks
        k[tall, head] *= 1.6
        direction = q[:, head].mean(0) + 0.1 * size * normal(dim) / math.sqrt(dim)
        chosen = torch.randint(length, (sinks,), generator=generator)
        lift = (0.5 + torch.rand(1, generator=generator).item()) * sharp * math.sqrt(dim)
        k[chosen, head] += direction * lift / direction.square().sum().clamp(min=1e-3)
        v[:, head] = (
            normal(int(objects.max()) + 1, dim)[objects] + phases.cos().repeat(1, 4)[:, :dim] + normal(length, dim)
        )
        v[chosen, head] *= 0.1
    return q[None], k[None], v[None]


def _objects(grid: tuple[int, int, int], generator: torch.Generator, count: int = 6) -> Tensor:
    """Which of `count` moving regions every token belongs to: int64 [L]. Each has a centre that moves on a line; a
    token belongs to the nearest."""
    T, Y, X = grid
    start = torch.rand(count, 2, generator=generator) * torch.tensor([Y, X])
    speed = (torch.rand(count, 2, generator=generator) - 0.5) * torch.tensor([Y, X]) / max(T, 1)
    centres = start + torch.arange(T)[:, None, None] * speed  # [T, count, 2]
    rows, columns = torch.meshgrid(torch.arange(Y), torch.arange(X), indexing="ij")
    cells = torch.stack([rows, columns], -1).flatten(0, 1).float()  # [Y * X, 2]
    return torch.cdist(cells.expand(T, -1, -1), centres).argmin(-1).flatten()

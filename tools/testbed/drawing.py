"""Clips of the test bed, drawn on a CPU.

Lengths are units: pixels of a frame whose shorter side has 256. The ground and the objects keep their textures, which
are random, so a model has to copy them from frame to frame, over the camera's motion and behind the pillar.

Legend: B clips, N = B * F pictures, F frames, H rows, W columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.testbed.scenes import OBJECTS, TEXTURES, World, shades
from wan_core.pipeline.embedded import SHAPES
from wan_lab.shapes import DIRECTIONS, signed_distance

SIDE = 256.0
FRAMES = 41  # of a whole clip: in its middle frame everything is well in view
RADIUS = (32.0, 44.0)
SPEED = (2.0, 4.0)  # of objects over the ground, units a frame
PAN = (1.5, 3.0)  # of the camera
NEAR = 1.3  # the pillar is nearer than the rest and moves so much more when the camera does
PILLAR_WIDTH = (70.0, 100.0)
OBJECT_PERIOD, GROUND_PERIOD = (22.0, 32.0), (40.0, 60.0)
CELLS = 16  # rows and columns of a mosaic before it repeats


@dataclass(frozen=True)
class Size:
    frames: int = FRAMES
    height: int = 256
    width: int = 384


@dataclass(frozen=True)
class Texture:
    """The textures of surfaces, one a clip: kind [B] of TEXTURES, period [B], angle [B], phase [B, 2], cells of the
    mosaic [B, CELLS, CELLS], tones [B, 2, 3]."""

    kind: Tensor
    period: Tensor
    angle: Tensor
    phase: Tensor
    cells: Tensor
    tones: Tensor

    def colour(self, x: Tensor, y: Tensor, scale: float) -> Tensor:
        """RGB [B, F, H, W, 3] at places x, y [B, F, H, W] of the surface, edges smoothed over a pixel."""
        u, v = x + self.phase[:, 0, None, None, None], y + self.phase[:, 1, None, None, None]
        period = self.period[:, None, None, None]
        mosaic = self._mosaic(u / period, v / period, period * scale)
        cos, sin = self.angle.cos()[:, None, None, None], self.angle.sin()[:, None, None, None]
        across, along = (u * cos + v * sin) / period, (v * cos - u * sin) / period
        a, b = (((w - w.floor() - 0.5).abs() - 0.25) * period * scale for w in (across, along))
        stripe, other = ((d + 0.5).clamp(0, 1) for d in (a, b))
        dx, dy = (w - w.floor() - 0.5 for w in (across, along))
        dots = ((0.3 - torch.hypot(dx, dy)) * period * scale + 0.5).clamp(0, 1)
        checks = stripe + other - 2 * stripe * other
        kinds = torch.stack([torch.zeros_like(stripe), stripe, checks, dots, mosaic])  # as TEXTURES
        kind = self.kind[None, :, None, None, None].expand(1, *stripe.shape)
        mix = kinds.gather(0, kind)[0][..., None]
        first, second = self.tones[:, :, None, None, None].unbind(1)
        return torch.lerp(first, second, mix)

    def _mosaic(self, u: Tensor, v: Tensor, pixels: Tensor) -> Tensor:
        """Values of the cells, blended over a pixel at their borders. pixels: of a cell's side."""
        (row, down), (column, right) = (self._cell(w, pixels) for w in (v, u))
        clip = torch.arange(len(self.cells), device=u.device)[:, None, None, None]
        corners = [self.cells[clip, (row + i) % CELLS, (column + j) % CELLS] for i in (0, 1) for j in (0, 1)]
        return torch.lerp(torch.lerp(corners[0], corners[1], right), torch.lerp(corners[2], corners[3], right), down)

    @staticmethod
    def _cell(w: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """The cell before the nearest border, and how much of the one after it shows."""
        whole = (w - 0.5).floor()
        return whole.long(), ((w - 1 - whole) * pixels + 0.5).clamp(0, 1)


def draw_worlds(worlds: Sequence[World], size: Size, seed: int) -> Tensor:
    """Clips [B, 3, F, H, W] in -1..1 of scenes, from their first frame on."""
    scale = min(size.height, size.width) / SIDE
    place = Layout.random(worlds, size.width / scale, size.height / scale, torch.Generator().manual_seed(seed))
    time = torch.arange(size.frames) - (FRAMES - 1) / 2
    y, x = ((torch.arange(side) + 0.5) / scale for side in (size.height, size.width))
    x, y = torch.broadcast_tensors(x[None, None, None], y[None, None, :, None])
    return place.picture(time, x, y, scale).permute(0, 4, 1, 2, 3) * 2 - 1


@dataclass(frozen=True)
class Layout:
    """Where everything of B scenes is. Places are those of the middle frame [B, 2] (x, y), speeds units a frame."""

    camera: Tensor  # speed [B, 2]
    ground: Texture
    things: list[tuple[Tensor, Tensor, Tensor, Tensor, Texture]]  # shape [B] (-1: none), place, speed, radius, texture
    pillar: tuple[Tensor, Tensor, Tensor, Tensor]  # there [B], place of its centre, its width [B], tones [B, 2, 3]

    @staticmethod
    def random(worlds: Sequence[World], width: float, height: float, generator: torch.Generator) -> Layout:
        count = len(worlds)

        def uniform(low: float, high: float, *more: int) -> Tensor:
            return low + (high - low) * torch.rand(count, *more, generator=generator)

        def speed(motions: Sequence[str], low: float, high: float) -> Tensor:
            return table([DIRECTIONS[m] for m in motions]) * uniform(low, high, 1)

        def texture(kinds: Sequence[str], colours: Sequence[str], period: tuple[float, float]) -> Texture:
            kind = torch.tensor([TEXTURES.index(k) for k in kinds])
            cells = torch.randint(3, (count, CELLS, CELLS), generator=generator) / 2
            tones = table([shades(c) for c in colours])
            return Texture(kind, uniform(*period), uniform(0, math.pi), uniform(0, 1000, 2), cells, tones)

        things = []
        slots = torch.rand(count, OBJECTS, generator=generator).argsort(1)  # columns of the picture
        for i in range(OBJECTS):
            seen = [world.things[i] if i < len(world.things) else None for world in worlds]
            things_shown = [thing or worlds[0].things[0] for thing in seen]
            shape = torch.tensor([-1 if t is None else SHAPES.index(t.shape) for t in seen])
            column = (slots[:, i] + uniform(0.2, 0.8)) / OBJECTS
            place = torch.stack([column * width, uniform(0.25, 0.75) * height], 1)
            skin = texture([t.texture for t in things_shown], [t.colour for t in things_shown], OBJECT_PERIOD)
            things.append((shape, place, speed([t.motion for t in things_shown], *SPEED), uniform(*RADIUS), skin))
        there = torch.tensor([world.pillar is not None for world in worlds])
        hides = torch.tensor([world.hides for world in worlds])
        centre = torch.where(hides, things[0][1][:, 0], things[-1][1][:, 0])  # the last column is free
        tones = table([shades(world.pillar or "white") for world in worlds])
        return Layout(
            camera=speed([world.camera for world in worlds], *PAN),
            ground=texture([w.ground[1] for w in worlds], [w.ground[0] for w in worlds], GROUND_PERIOD),
            things=things,
            pillar=(there, centre, uniform(*PILLAR_WIDTH), tones),
        )

    def picture(self, time: Tensor, x: Tensor, y: Tensor, scale: float) -> Tensor:
        """RGB [B, F, H, W, 3] in 0..1 at frames `time` [F] and places x, y [1, 1, H, W] of the view."""
        seen = self.camera[:, None] * time[:, None]  # [B, F, 2]: what the camera has moved
        cx, cy = (w[..., None, None] for w in seen.unbind(-1))
        result = self.ground.colour(x + cx, y + cy, scale)
        for shape, place, speed, radius, texture in self.things:
            px, py = (w[..., None, None] for w in (place[:, None] + speed[:, None] * time[:, None] - seen).unbind(-1))
            u, v = x - px, y - py
            distance = signed_distance(u, v, radius[:, None, None, None])
            chosen = shape.clamp(min=0)[:, None, None, None, None].expand(*distance.shape[:4], 1)
            cover = (0.5 - distance.gather(-1, chosen) * scale).clamp(0, 1)
            cover = cover * (shape >= 0)[:, None, None, None, None]
            result = torch.lerp(result, texture.colour(u, v, scale), cover)
        there, centre, width, tones = self.pillar
        away = (x - centre[:, None, None, None] + NEAR * cx).expand(result.shape[:4])
        half = 0.5 * width[:, None, None, None]
        cover = ((half - away.abs()) * scale + 0.5).clamp(0, 1) * there[:, None, None, None]
        light, dark = tones[:, :, None, None, None].unbind(1)
        rounded = torch.lerp(light, dark, (away / half).abs().clamp(0, 1)[..., None] ** 2)  # darker to its sides
        return torch.lerp(result, rounded, cover[..., None])


def table(rows: Sequence[object]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)

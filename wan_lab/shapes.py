"""The scenes of the embedded model: one drawn shape on a plain background, moving or standing still.

A `Scene` is four words, and its caption one sentence (`wan_core.pipeline.embedded`). `draw` renders batches of scenes
with signed distance functions, anti-aliased, on any device.
`wan_lab.metrics.judge` decides from frames alone whether a video shows its caption.

Shapes: B batch, F frames, H rows, W columns. Pixel (row i, column j) covers [i, i+1) x [j, j+1); y points down.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wan_core.pipeline.embedded import COLOURS, FRAMES, MOTIONS, SHAPES, Scene

# Far apart in CIELAB (the closest pair, blue and purple, is 49 units apart), so that a small VAE keeps them distinct.
PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (214, 25, 45),
    "green": (30, 160, 60),
    "blue": (25, 105, 230),
    "yellow": (255, 228, 40),
    "purple": (160, 32, 165),
    "orange": (250, 140, 20),
    "white": (245, 245, 245),
    "black": (16, 16, 16),
}
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), "still": (0, 0)}  # (x, y)

REFERENCE_SIZE = 96  # the lengths below are pixels of a frame whose shorter side is this long; they scale with it
RADIUS = (15.0, 20.0)  # half of the larger side of a shape's bounding box
TRAVEL = (20.0, 40.0)  # from the first frame to the last, for every motion but "still"
MARGIN = 3.0  # background left free at the frame's border
SIZE = 96


SCENES: tuple[Scene, ...] = tuple(
    Scene(colour, shape, motion, background)
    for colour in COLOURS
    for shape in SHAPES
    for motion in MOTIONS
    for background in COLOURS
    if background != colour
)  # all 1,120


def held_out(scene: Scene) -> bool:
    """Whether the embedded model was not trained on this combination (110 of 1,120; any three of its words occur
    together in training)."""
    return zlib.crc32(scene.caption.encode()) % 28 < 3


@dataclass(frozen=True)
class Paths:
    """The drawing parameters of a batch of clips, one row per clip. Colours are RGB 0..1, lengths in pixels.

    `shape` [B] indexes SHAPES, `colour` and `background` are [B, 3], `start` and `travel` [B, 2] are (x, y), `radius`
    [B]. `bend` [B, 2], where it is given, times t (1 - t) is added to a centre at time t: a curve instead of a line.
    """

    shape: Tensor
    colour: Tensor
    background: Tensor
    start: Tensor
    travel: Tensor
    radius: Tensor
    bend: Tensor | None = None

    def to(self, device: torch.device | str) -> Paths:
        return Paths(**{name: value.to(device) for name, value in vars(self).items() if value is not None})


def scene_table(scenes: Sequence[Scene] = SCENES) -> Tensor:
    """int64 [len(scenes), 4]: indices of colour, shape, motion, background. Rows can be gathered on a GPU."""
    rows = [
        (COLOURS.index(s.colour), SHAPES.index(s.shape), MOTIONS.index(s.motion), COLOURS.index(s.background))
        for s in scenes
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)


def sample_paths(table: Tensor, *, height: int, width: int, generator: torch.Generator) -> Paths:
    """Random radius, travel and start for every row of `table` [B, 4], such that the whole path stays in frame.

    The random numbers are drawn on `generator.device`, and so is the result: equal seeds draw equal clips per device.
    """
    if min(height, width) < 32:
        raise ValueError(f"{height}x{width} is too small for a recognisable shape: use 32 pixels or more a side")
    device = generator.device
    table = table.to(device)
    scale = min(height, width) / REFERENCE_SIZE
    u_radius, u_travel, u_x, u_y = torch.rand(4, len(table), generator=generator, device=device)
    palette = torch.tensor(list(PALETTE.values()), device=device) / 255.0  # [8, 3]
    direction = torch.tensor(list(DIRECTIONS.values()), device=device)[table[:, 2]]  # [B, 2]

    radius = scale * (RADIUS[0] + (RADIUS[1] - RADIUS[0]) * u_radius)
    travel = direction * (scale * (TRAVEL[0] + (TRAVEL[1] - TRAVEL[0]) * u_travel))[:, None]
    frame = torch.tensor([width, height], device=device, dtype=torch.float32)
    low = (radius + scale * MARGIN)[:, None] - travel.clamp(max=0)  # [B, 2]
    high = frame - (radius + scale * MARGIN)[:, None] - travel.clamp(min=0)
    start = low + (high - low) * torch.stack([u_x, u_y], dim=1)
    return Paths(table[:, 1], palette[table[:, 0]], palette[table[:, 3]], start, travel, radius)


def curved(paths: Paths, *, height: int, width: int, generator: torch.Generator) -> Paths:
    """`paths` whose motion is a random curve that stays in frame: of a Bezier curve with one control point, as long and
    in whatever direction it comes."""
    reach = (paths.radius + MARGIN * min(height, width) / REFERENCE_SIZE)[:, None]  # [B, 1]
    room = torch.tensor([width, height], device=reach.device) - 2 * reach  # [B, 2]
    points = torch.rand(3, len(reach), 2, generator=generator, device=generator.device).to(reach.device)
    first, middle, last = reach + room * points
    return replace(paths, start=first, travel=last - first, bend=2 * middle - first - last)


def repainted(paths: Paths, table: Tensor) -> Paths:
    """`paths` with the shape and the colours of other scenes, rows of `table` [B, 4]."""
    table = table.to(paths.start.device)
    palette = torch.tensor(list(PALETTE.values()), device=table.device) / 255.0
    return replace(paths, shape=table[:, 1], colour=palette[table[:, 0]], background=palette[table[:, 3]])


def signed_distance(x: Tensor, y: Tensor, radius: Tensor) -> Tensor:
    """Distances in pixels to the outline of every shape, negative inside: broadcast (x, y, radius) -> [..., 4] as
    SHAPES.

    (x, y) is measured from the centre of the shape's bounding box, whose larger side is 2 * radius. Outside of
    corners the distance is to the extended edges, which is all that anti-aliasing over one pixel needs.
    """
    ax, ay = x.abs(), y.abs()
    circle = torch.hypot(x, y) - radius
    square = torch.maximum(ax, ay) - 0.9 * radius
    # Equilateral, pointing up: side 2 r, height sqrt(3) r, so the box is centred sqrt(3)/2 r above the base.
    half = 0.8660254 * radius
    triangle = torch.maximum(y - half, 0.8660254 * ax - 0.5 * (y + half))
    arm = 0.36 * radius
    cross = torch.minimum(torch.maximum(ax - radius, ay - arm), torch.maximum(ax - arm, ay - radius))
    return torch.stack(torch.broadcast_tensors(circle, square, triangle, cross), dim=-1)


def coverage(shape: Tensor, centre: Tensor, radius: Tensor, *, height: int, width: int) -> Tensor:
    """How much of each pixel a shape covers, 0..1: shape [N], centre [N, 2] (x, y), radius [N] -> [N, H, W] float32."""
    x = torch.arange(width, device=centre.device) + 0.5 - centre[:, 0, None]  # [N, W]
    y = torch.arange(height, device=centre.device) + 0.5 - centre[:, 1, None]  # [N, H]
    distance = signed_distance(x[:, None, :], y[:, :, None], radius[:, None, None])  # [N, H, W, 4]
    chosen = shape[:, None, None, None].expand(*distance.shape[:3], 1)
    return (0.5 - distance.gather(-1, chosen)[..., 0]).clamp(0, 1)


def render(paths: Paths, *, frames: int = FRAMES, height: int = SIZE, width: int = SIZE) -> Tensor:
    """Draw every path: -> float32 [B, 3, F, H, W] in -1..1, on the paths' device. Motion in a line is uniform."""
    batch = len(paths.shape)
    time = torch.linspace(0, 1, frames, device=paths.start.device)  # [F]
    centre = paths.start[:, None] + paths.travel[:, None] * time[:, None]  # [B, F, 2]
    if paths.bend is not None:
        centre = centre + paths.bend[:, None] * (time * (1 - time))[:, None]
    alpha = coverage(
        paths.shape.repeat_interleave(frames),
        centre.reshape(-1, 2),
        paths.radius.repeat_interleave(frames),
        height=height,
        width=width,
    ).view(batch, 1, frames, height, width)
    colour, background = (c.view(batch, 3, 1, 1, 1) for c in (paths.colour, paths.background))
    return torch.lerp(background, colour, alpha) * 2 - 1


def draw(scenes: Sequence[Scene], *, seed: int, frames: int = FRAMES, height: int = SIZE, width: int = SIZE) -> Tensor:
    """Random clips of the given scenes: float32 [B, 3, F, H, W] in -1..1 on the CPU, the same for equal arguments."""
    generator = torch.Generator().manual_seed(seed)
    paths = sample_paths(scene_table(scenes), height=height, width=width, generator=generator)
    return render(paths, frames=frames, height=height, width=width)

"""What the embedded model's driven variant is given, and what is to come of it, drawn.

A picture of a scene, a video in which another shape in other colours moves, and the video to be made: the picture's
look (colour, shape, background) with the places and the size of the driving shape, frame by frame.

Shapes: B batch, F frames, H rows, W columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wan_core.pipeline.embedded import COLOURS, FRAMES, SHAPES
from wan_lab.metrics import track
from wan_lab.shapes import REFERENCE_SIZE, SIZE, curved, render, repainted, sample_paths

FOLLOWS = 6.0  # pixels of a 96-pixel frame between two tracks, on average, below which one follows the other


@dataclass(frozen=True)
class Trio:
    """reference [B, 3, H, W], driving and made [B, 3, F, H, W] in -1..1. is_curved [B]: the motion is none of
    MOTIONS."""

    reference: Tensor
    driving: Tensor
    made: Tensor
    is_curved: Tensor


def draw_trios(
    table: Tensor,
    *,
    generator: torch.Generator,
    curved_share: float = 0.0,
    frames: int = FRAMES,
    height: int = SIZE,
    width: int = SIZE,
) -> Trio:
    """Draws trios for the scenes `table` [B, 4], which say how the made video looks and, unless it is curved, moves."""
    device = generator.device
    table = table.to(device)
    paths = sample_paths(table, height=height, width=width, generator=generator)
    bent = curved(paths, height=height, width=width, generator=generator)
    is_curved = torch.rand(len(table), generator=generator, device=device) < curved_share
    chosen = is_curved[:, None]
    assert bent.bend is not None
    paths = replace(
        paths,
        start=torch.where(chosen, bent.start, paths.start),
        travel=torch.where(chosen, bent.travel, paths.travel),
        bend=bent.bend * chosen,
    )
    still = sample_paths(table, height=height, width=width, generator=generator)
    driving = repainted(paths, other_looks(table, generator))
    return Trio(
        render(still, frames=1, height=height, width=width)[:, :, 0],
        render(driving, frames=frames, height=height, width=width),
        render(paths, frames=frames, height=height, width=width),
        is_curved,
    )


def other_looks(table: Tensor, generator: torch.Generator) -> Tensor:
    """Rows of `scene_table` with the motions of `table` [B, 4], and another shape in other colours."""

    def step(most: int) -> Tensor:
        return torch.randint(1, most, (len(table),), generator=generator, device=table.device)

    colour, shape = (table[:, 0] + step(len(COLOURS))) % len(COLOURS), (table[:, 1] + step(len(SHAPES))) % len(SHAPES)
    background = (colour + step(len(COLOURS))) % len(COLOURS)
    return torch.stack([colour, shape, table[:, 2], background], 1)


def follows(frames: Tensor, driving: Tensor) -> bool:
    """Whether the shape in `frames` moves as the one in `driving`, both [F, H, W, 3] as `describe` takes them: it is
    seen in every frame, and near the other one's place."""
    ours, theirs = track(frames), track(driving)
    if ours is None or theirs is None or len(ours) != len(theirs):
        return False
    return float((ours - theirs).norm(dim=1).mean()) < FOLLOWS * min(frames.shape[1:3]) / REFERENCE_SIZE

"""How far shapes move: by drawn clips, of which the way is known to be one, or none."""

from __future__ import annotations

import pytest
import torch

from wan_core.pipeline.embedded import parse_caption
from wan_lab.metrics import motion_amplitude
from wan_lab.shapes import draw


def frames_of(caption: str) -> torch.Tensor:
    """[17, 96, 96, 3] in 0..1."""
    return (draw([parse_caption(caption)], seed=3)[0].permute(1, 2, 3, 0) + 1) / 2


def test_a_shape_that_moves_has_an_amplitude() -> None:
    moving = motion_amplitude(frames_of("a red circle moving right on a blue background"))
    still = motion_amplitude(frames_of("a red circle standing still on a blue background"))
    assert moving is not None and still is not None and still < 0.2 < 1 < moving
    half = torch.nn.functional.interpolate(
        frames_of("a red circle moving right on a blue background").movedim(-1, 1), scale_factor=2.0
    ).movedim(1, -1)
    assert motion_amplitude(half) == pytest.approx(moving, rel=0.1)  # in pixels of 96, whatever the size
    assert motion_amplitude(torch.full((5, 96, 96, 3), 0.5)) is None

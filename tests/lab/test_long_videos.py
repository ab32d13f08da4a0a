"""The measures of long videos on drawn clips."""

from __future__ import annotations

import pytest
import torch

from wan_core.pipeline.embedded import Scene
from wan_lab.long_videos import ClipFacts, clip_facts, row_of
from wan_lab.metrics import motion_amplitude
from wan_lab.shapes import draw, sample_paths, scene_table

MOVING, STILL = Scene("red", "circle", "right", "blue"), Scene("green", "square", "still", "white")


def frames_of(scene: Scene) -> torch.Tensor:
    return (draw([scene], seed=2)[0].permute(1, 2, 3, 0) + 1) / 2


def test_amplitude_is_the_way_from_frame_to_frame() -> None:
    paths = sample_paths(scene_table([MOVING]), height=96, width=96, generator=torch.Generator().manual_seed(2))
    amplitude = motion_amplitude(frames_of(MOVING))
    assert amplitude == pytest.approx(float(paths.travel.norm()) / 16, rel=0.1)
    assert motion_amplitude(frames_of(STILL)) == pytest.approx(0, abs=0.05)
    assert motion_amplitude(torch.full((5, 96, 96, 3), 0.5)) is None


def test_a_shape_is_itself_and_colours_are_off_where_they_are_another_s() -> None:
    frames = frames_of(MOVING)
    own, other = (clip_facts(frames, scene, frames[0]) for scene in (MOVING, STILL))
    assert own.same and not other.same and own.off < 1
    assert clip_facts(frames_of(STILL), MOVING, frames[0]).off > 20


def test_a_row_has_the_means_of_scenes() -> None:
    facts = [ClipFacts(1.0, True, 0.0, (0.5,) * 3, (0.1,) * 3), ClipFacts(None, False, 2.0, (0.6,) * 3, (0.1,) * 3)]
    row = row_of("x", [MOVING, STILL], [facts, facts])
    assert row["same"] == [1.0, 0.0] and row["amplitude"] == [1.0, None] and row["drift"] == 0.1

"""Colours of clips matched to the first, and their drift in the report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from wan_core.config import Request
from wan_core.pipeline.clips import run_key
from wan_core.pipeline.colours import (
    ColourMatch,
    lab,
    pixels_of,
    rgb_of,
    statistics,
    unit,
)
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.run import Watch


def tinted(frames: np.ndarray, gain: float, offset: float) -> np.ndarray:
    """Frames whose CIELAB channels have another deviation and mean."""
    colours = lab(torch.from_numpy(frames).float() / 255)
    mean = colours.mean((0, 1, 2))
    return (rgb_of((colours - mean) * gain + mean + offset) * 255).round().to(torch.uint8).numpy()


@pytest.fixture(scope="module")
def scene() -> np.ndarray:
    """Four frames in the middle of what screens show, so that nothing is cut off."""
    return np.random.default_rng(1).integers(90, 160, (4, 16, 24, 3), np.uint8)


def test_cielab_has_an_inverse() -> None:
    rgb = torch.rand(50, 3)
    torch.testing.assert_close(rgb_of(lab(rgb)), rgb, rtol=0, atol=1e-5)
    torch.testing.assert_close(
        lab(torch.tensor([[1.0, 1, 1], [0, 0, 0]]))[:, 0], torch.tensor([100.0, 0]), atol=0.01, rtol=0
    )


def test_a_tinted_clip_gets_the_colours_of_the_first_again(scene: np.ndarray) -> None:
    """Another light and tint are undone whole at strength 1, and half of the mean at 0.5."""
    cpu, other = torch.device("cpu"), tinted(scene, 0.8, 4.0)
    assert np.abs(other.astype(int) - scene).mean() > 5
    matched = {}
    for strength in (1.0, 0.5):
        match = ColourMatch(strength, cpu)
        assert match.change(scene) is None
        change = match.change(other)
        assert change is not None
        matched[strength] = np.stack([pixels_of(change(unit(frame, cpu))) for frame in other])
    assert np.abs(matched[1.0].astype(int) - scene).max() <= 2
    half = statistics(matched[0.5], cpu)[0] - statistics(scene, cpu)[0]
    torch.testing.assert_close(half, (statistics(other, cpu)[0] - statistics(scene, cpu)[0]) / 2, rtol=0, atol=0.2)


@pytest.mark.parametrize("svi", [None, True])
def test_clips_after_the_first_are_matched(
    image_pipe: Pipeline, picture: str, svi: bool | None, tmp_path: Path
) -> None:
    size = {"width": 48, "height": 32, "frames": 29, "clip_frames": 17, "overlap": 5, "steps": 2}
    asked = [Request(prompt="x", image=picture, svi=svi, match_colours=one, **size) for one in (0.0, 1.0)]  # type: ignore[arg-type]
    usual, full = (image_pipe.generate(one, Watch(keep_clips=tmp_path / f"{place}")) for place, one in enumerate(asked))
    assert np.array_equal(full.frames[:17], usual.frames[:17]) and not np.array_equal(full.frames, usual.frames)
    assert len(full.report.clips) == 2 and any(note.startswith("colours: ") for note in full.report.notes)
    again = image_pipe.generate(asked[1], Watch(keep_clips=tmp_path / "1"))
    assert np.array_equal(again.frames, full.frames)
    assert len({run_key(image_pipe.prepare(one)) for one in asked}) == 2
    wanted, *means = (
        statistics(one, torch.device("cpu"))[0] for one in (full.frames[:17], usual.frames[17:], full.frames[17:])
    )
    before, after = ((mean - wanted).norm() for mean in means)
    assert after < 0.6 * before  # what no screen shows is cut

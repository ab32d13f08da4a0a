"""S2V on ranks over gloo: runs that skip, and long videos, equal one rank's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import given as over
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))  # as in test_parallel.py
import parallel_checks
from parallel_ranks import Ranks

from tests.pipeline import test_sound_clips
from tests.pipeline.test_sound_clips import loop
from wan_core.pipeline.sources import TINY

ROUNDING = 1e-5
FEW = settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
folder = test_sound_clips.folder  # a fixture


@pytest.fixture(scope="module")
def ranks():
    found = Ranks(4)
    yield found
    found.close()


@FEW
@over(
    mesh=st.sampled_from(["1x1x2", "1x2x1", "2x1x1", "2x1x2", "1x2x2", "2x2x1"]),
    grid=st.tuples(st.just(1), st.integers(1, 3), st.integers(4, 7), st.integers(4, 7)),
    motion=st.booleans(),
)
def test_runs_that_skip_forwards_equal_one_rank(ranks, mesh, grid, motion):
    for error, counts in ranks.ask("sound_run", mesh=mesh, how="magcache", grid=grid, motion=motion):
        assert error < ROUNDING and counts > 1e-6


@FEW
@over(
    mesh=st.sampled_from(["1x1x2", "2x1x1", "2x1x2"]),
    grid=st.tuples(st.just(1), st.just(2), st.integers(6, 8), st.integers(6, 8)),
    motion=st.booleans(),
)
def test_sparse_runs_equal_one_rank(ranks, mesh, grid, motion):
    """Sparse attention does not go around a ring."""
    for error, counts in ranks.ask("sound_run", mesh=mesh, how="sparse", grid=grid, motion=motion):
        assert error < ROUNDING and counts > 1e-4


@pytest.fixture(scope="module")
def asked(folder):
    """A long video, of which each clip goes on from the last."""
    given = {name: str(TINY / f"{name}.safetensors") for name in ("text_encoder", "vae")}
    given |= {"high": str(folder / "small.safetensors"), "audio_encoder": str(folder / "wav2vec2.safetensors")}
    request = {"reference": str(folder / "reference.png"), "audio": str(folder / "speech.wav"), "frames": 20}
    request |= {"steps": 1, "width": 64, "height": 64, "clip_frames": loop.CLIP - 3, "guidance_high": 2.0}
    return {"model": None, "request": request, **given}


@pytest.fixture(scope="module")
def alone(asked):
    return parallel_checks.trajectory(None, **asked)


@pytest.mark.parametrize("mesh", ["1x1x2", "2x1x2"])
def test_clips_on_ranks_equal_one_rank(ranks, asked, alone, mesh):
    answers, (latents, frames, _) = ranks.ask("trajectory", mesh=mesh, **asked), alone
    for one, shown, said in answers:
        assert torch.equal(one, answers[0][0]) and said["mesh"] == mesh
        assert parallel_checks.relative(one, latents) < 1e-4
        assert int((shown.int() - frames.int()).abs().max()) <= 1

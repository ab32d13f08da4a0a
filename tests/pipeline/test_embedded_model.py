"""The embedded model through the whole pipeline: what the caption says is what the frames show.

The full evaluation, more than 200 held-out captions and seeds, is in benchmarks/results/embedded-*.json; here a sample
of it that a CPU makes in seconds.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from wan_core.config import LoadOptions, Request
from wan_core.pipeline.pipeline import Pipeline
from wan_lab.metrics import judge
from wan_lab.shapes import SCENES, draw, held_out

HELD_OUT = [scene for scene in SCENES if held_out(scene)]
SAMPLE = HELD_OUT[5::17][:3]


@pytest.fixture(scope="module")
def frames_of(pipe):
    """Frames of a scene's caption, by the default solver; the same ones for all tests that ask."""
    return cache(lambda scene: torch.from_numpy(pipe.generate(Request(prompt=scene.caption, seed=7)).frames))


def test_captions_never_trained_on_come_true(frames_of):
    verdicts = [judge(frames_of(scene), scene) for scene in SAMPLE]
    for word in ("background", "colour", "motion"):
        assert sum(getattr(v, word) for v in verdicts) >= len(SAMPLE) - 1, word
    assert sum(v.all_true for v in verdicts) >= len(SAMPLE) - 1


def test_another_caption_makes_another_video(frames_of):
    """A model that ignored its prompt would pass nothing: the same seed with another caption fails the first one."""
    first, second = SAMPLE[0], next(s for s in SAMPLE if s.colour != SAMPLE[0].colour)
    assert not judge(frames_of(second), first).all_true


def test_every_solver_keeps_the_caption(pipe, frames_of):
    scene = SAMPLE[1]
    assert pipe.prepare(Request(prompt=scene.caption)).job.plan.solver == "unipc"
    frames = {"unipc": frames_of(scene)}
    for solver in ("dpm++", "euler"):
        result = pipe.generate(Request(prompt=scene.caption, seed=7, solver=solver, steps=12))
        frames[solver] = torch.from_numpy(result.frames)
    for solver, video in frames.items():
        verdict = judge(video, scene)
        assert verdict.background and verdict.colour and verdict.motion, solver


def test_an_image_starts_the_video(tmp_path):
    """The first frame is the picture that was given, and what is in it moves as the caption says."""
    from PIL import Image

    path, pipe, right = tmp_path / "first.png", None, 0
    for scene in SAMPLE[:2]:
        clip = draw([scene], seed=3)[0]  # [3, F, H, W] in -1..1
        picture = ((clip[:, 0] + 1) * 127.5).round().byte().permute(1, 2, 0)
        Image.fromarray(picture.numpy()).save(path)
        request = Request(prompt=scene.caption, image=str(path), seed=2)
        pipe = pipe or Pipeline.load(LoadOptions(model="tiny", device="cpu"), request=request)
        frames = torch.from_numpy(pipe.generate(request).frames)
        assert (frames[0].float() - picture.float()).abs().mean() < 12
        right += judge(frames, scene).all_true
    assert right == 2

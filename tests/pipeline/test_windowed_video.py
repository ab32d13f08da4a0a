"""A video in context windows from a request: the embedded model, its memory, its report and an interruption."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from wan_core.cli import main
from wan_core.config import LoadOptions, Request, SkipOptions, TaylorSeerOptions, WindowOptions
from wan_core.media.video import read_metadata
from wan_core.pipeline.check import make_job
from wan_core.pipeline.memory_planning import Workload, beside_workload
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.sources import find_models
from wan_core.sampling.cache.residual import ResidualCache
from wan_lab.metrics import judge

CAPTION = "a red circle moving right on a blue background"
TINY = LoadOptions(model="tiny", device="cpu")
LONG = Request(prompt=CAPTION, width=32, height=32, frames=25, steps=4, seed=1)
WINDOWS = WindowOptions(length=3, overlap=1)


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline.load(TINY, request=LONG)


def latents(pipe: Pipeline, request: Request) -> torch.Tensor:
    run = pipe.prepare(request)
    return pipe.sample(run, pipe.encode(run))


def test_a_report_says_what_ran(pipe: Pipeline) -> None:
    result = pipe.generate(replace(LONG, windows=WINDOWS))
    assert result.frames.shape == (25, 32, 32, 3) and result.latents.isfinite().all()
    assert result.report.settings["windows"] == WINDOWS.words()
    assert any("each a forward of its own" in note for note in result.report.notes)
    assert result.plan.forwards == sum(2 * len(step.windows) for step in result.plan.steps)
    assert not torch.equal(result.latents, latents(pipe, LONG))


def test_a_video_twice_as_long_as_in_training_shows_what_it_should(pipe: Pipeline) -> None:
    """The embedded model saw 17 frames."""
    long = Request(prompt=CAPTION, frames=33, steps=8, windows=WindowOptions.parse("17/8"))
    assert judge(torch.from_numpy(pipe.generate(long).frames), CAPTION).all_true
    assert not judge(torch.from_numpy(pipe.generate(replace(long, windows=None)).frames), CAPTION).all_true


def test_a_video_that_fits_is_made_as_without_windows(pipe: Pipeline) -> None:
    wide = replace(LONG, windows=WindowOptions(length=7, overlap=3))
    assert torch.equal(latents(pipe, wide), latents(pipe, LONG))
    assert "windows" not in pipe.report.settings


@pytest.mark.parametrize("windows", ["9/4", "9/4:standard_static:flat"])
def test_an_interruption_leaves_nothing_behind(pipe: Pipeline, windows: str) -> None:
    request = replace(LONG, steps=12, windows=WindowOptions.parse(windows))
    if "static" in windows:
        request = replace(request, skip=SkipOptions(taylorseer=TaylorSeerOptions(interval=2, retention=0.1)))

    class Interrupted(Exception):
        pass

    def interrupt(progress: object, seconds: float | None) -> None:
        if progress.step.index == 2:
            raise Interrupted

    run = pipe.prepare(request)
    conditioning = pipe.encode(run)
    wanted = pipe.sample(run, conditioning)
    with pytest.raises(Interrupted):
        pipe.sample(run, conditioning, interrupt)
    assert torch.equal(pipe.sample(run, conditioning), wanted)
    assert all(pipe.models.expert(name).runners.find(ResidualCache) is None for name in ("high", "low"))


def test_memory_is_that_of_a_window() -> None:
    """Activations of the largest window; residuals of all of them, and latents; decoding as before."""
    models = find_models(TINY)

    def job_and_activations(request: Request):
        job = make_job(request, models.facts(()))
        return job, beside_workload(models, Workload.of(job), 10.0, 4)

    skip = SkipOptions(taylorseer=TaylorSeerOptions(interval=2, retention=0.1))
    still = replace(WINDOWS, schedule="standard_static")
    job, windowed = job_and_activations(replace(LONG, steps=12, skip=skip, windows=still))
    assert job.latent_shape[2] == 7 and job.plan.window_sizes(7) == (3, 4, 4)
    seen, short = job_and_activations(replace(LONG, steps=12, skip=skip, frames=13))
    assert job.tokens == seen.tokens == models.dit.tokens(4, *job.latent_shape[3:])
    assert windowed.residuals * 4 == short.residuals * 11 and windowed.decode == short.decode
    latents = 4 * (7 * 16 + 2 * 16) * (7 - 4) * 4 * 4
    assert windowed.denoise - windowed.residuals == short.denoise - short.residuals + latents


def test_the_command_line_makes_one_from_an_image(tmp_path: Path) -> None:
    picture, out = tmp_path / "first.png", tmp_path / "long.mp4"
    Image.effect_mandelbrot((48, 48), (-2, -1.2, 1, 1.2), 30).convert("RGB").save(picture)
    arguments = ["--model", "tiny", "--device", "cpu", "--prompt", CAPTION, "--image", str(picture), "--size", "32x32"]
    arguments += ["--frames", "21", "--steps", "3", "--windows", "9/4:relative:retain", "--out", str(out)]
    assert main(["generate", *arguments]) == 0
    assert read_metadata(out)["windows"] == "9/4:standard_uniform:relative:retain"


def test_a_list_of_videos_has_windows(tmp_path: Path) -> None:
    lines = tmp_path / "list.jsonl"
    video = {"prompt": CAPTION, "size": "32x32", "frames": 17, "steps": 2, "windows": "9/4"}
    lines.write_text(json.dumps(video))
    arguments = ["--model", "tiny", "--device", "cpu", "--prompts", str(lines), "--out", str(tmp_path / "a.mp4")]
    assert main(["generate", *arguments]) == 0
    assert [read_metadata(path)["windows"] for path in tmp_path.glob("*.mp4")] == ["9/4:standard_uniform:pyramid"]

"""Long runs in two worker processes: clips as one process makes them, and going on after ranks were lost."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.forked import forking
from tools.processes import below
from wan_core import make_plan
from wan_core.checkpoint.save import load_latents
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.execution.report import Report
from wan_core.pipeline import kept_steps
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.run import OnStep, Watch
from wan_core.pipeline.sources import TINY
from wan_core.sampling.denoise import Progress
from wan_core.sampling.start import Start
from wan_core.workers.client import WorkerEngine, on_steps
from wan_core.workers.launcher import WorkerError, Workers
from wan_core.workers.options import WorkerOptions

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"), pytest.mark.slow]


def test_workers_make_the_clips_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    picture = tmp_path / "anchor.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(picture)
    size = {"width": 64, "height": 64, "frames": 13, "clip_frames": 9, "steps": 2}
    asked = Request(
        prompt="a red circle moving right on a blue background", image=str(picture), svi=True, match_colours=1.0, **size
    )  # type: ignore[arg-type]
    loaded = LoadOptions(model="tiny", task="i2v-tiny", device="cpu")
    alone = Pipeline.load(loaded).generate(asked)
    with forking(1), Workers(WorkerOptions(devices=("cpu", "cpu"), mesh="1x1x2")) as workers:
        engine, kept = WorkerEngine(workers), tmp_path / "x.latents.safetensors"
        with pytest.raises(OptionError, match="--save-latents given"):
            engine.generate(loaded, replace(asked, svi=None), Watch(must_keep=True))
        together = engine.generate(
            loaded, asked, Watch(keep_latents=kept, must_keep=True, keep_clips=tmp_path / "x.clips")
        )
        with pytest.raises(OptionError, match="--save-latents given"):  # said by the ranks
            engine.generate(loaded, replace(asked, svi=None), Watch(must_keep=True))
    assert torch.equal(load_latents(kept)[0], together.latents) and len(together.kept_clips) == 2
    assert (together.latents - alone.latents).abs().max() <= 1e-4 * alone.latents.abs().max()
    assert np.abs(together.frames.astype(int) - alone.frames).max() <= 2
    assert len(together.report.clips) == 2 and together.report.settings["svi"]


def test_ranks_go_on_where_a_lost_run_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(kept_steps, "SECONDS", 0.0)  # of the ranks, too: they are forks
    asked = Request(prompt="a red circle", width=32, height=32, frames=5, steps=8, solver="unipc")
    loaded, folder = LoadOptions(model="tiny", device="cpu"), tmp_path / "x.clips"
    with forking(1), Workers(WorkerOptions(devices=("cpu", "cpu"), mesh="1x1x2")) as workers:
        engine = WorkerEngine(workers)
        whole = engine.generate(loaded, asked)

        def lost(progress: Progress, _: float | None) -> None:
            if progress.step.index == 4:
                assert workers._processes is not None
                os.kill(max(below(workers._processes.process.pid)), signal.SIGKILL)

        with pytest.raises(WorkerError):
            engine.generate(loaded, asked, Watch(step=lost, keep_clips=folder))
        [kept] = folder.iterdir()
        steps: list[int] = []
        watch = Watch(step=lambda progress, _: steps.append(progress.step.index))
        again = engine.generate(loaded, asked, replace(watch, keep_clips=folder))
    assert torch.equal(again.latents, whole.latents) and again.kept_clips == (kept,)
    assert 4 <= steps[0] <= 7 and steps == list(range(steps[0], 8))


def test_a_part_of_a_graph_goes_on_where_lost_ranks_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler node in a graph, whose ranks are lost: the same node, run again, goes on; another seed does not."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(kept_steps, "SECONDS", 0.0)
    files = {name: str(TINY / f"t2v_{name}.safetensors") for name in ("high", "low")}
    model = LoadOptions(**files, precision="fp32")
    plan = replace(make_plan(task="t2v-tiny", steps=8), latent_shape=(1, 16, 2, 6, 8))
    rows = dict.fromkeys(("cond", "uncond"), torch.zeros(1, 8, 64))
    steps: list[int] = []
    with forking(1), Workers(WorkerOptions(devices=("cpu", "cpu"), mesh="1x1x2")) as workers:

        def lost(progress: Progress, _: float | None) -> None:
            if progress.step.index == 4:
                assert workers._processes is not None
                os.kill(max(below(workers._processes.process.pid)), signal.SIGKILL)

        def sample(seed: int, on_step: OnStep | None = None) -> torch.Tensor:
            start, keep = Start(shape=plan.latent_shape, seed=seed), tmp_path / f"{len(steps)}.latents.safetensors"
            how: dict[str, Any] = {"start": start, "fps": 8, "plan": plan, "conditioning": rows}
            report, events = Report(torch.device("cpu")), {"step": on_steps([plan], on_step)}
            return WorkerEngine(workers).sample(model, report, events, keep=keep, **how)[0]

        whole = sample(7)
        with pytest.raises(WorkerError, match="run the same again to go on"):
            sample(7, lost)
        other = sample(8, lambda progress, _: steps.append(progress.step.index))
        assert steps == list(range(8)) and not torch.equal(other, whole)
        again = sample(7, lambda progress, _: steps.append(progress.step.index))
    assert torch.equal(again, whole) and 4 <= steps[8] <= 7 and not list(tmp_path.iterdir())

"""Clips of SVI 2.0 Pro with matched colours in two worker processes: the result of one process, and its report."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.forked import forking
from wan_core.checkpoint.save import load_latents
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.pipeline.pipeline import Pipeline
from wan_core.workers.client import WorkerEngine
from wan_core.workers.launcher import Workers
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
            engine.generate(loaded, replace(asked, svi=None), must_keep=True)
        together = engine.generate(loaded, asked, keep_latents=kept, must_keep=True, keep_clips=tmp_path / "x.clips")
        with pytest.raises(OptionError, match="--save-latents given"):  # said by the ranks
            engine.generate(loaded, replace(asked, svi=None), must_keep=True)
    assert torch.equal(load_latents(kept)[0], together.latents) and len(together.kept_clips) == 2
    assert (together.latents - alone.latents).abs().max() <= 1e-4 * alone.latents.abs().max()
    assert np.abs(together.frames.astype(int) - alone.frames).max() <= 2
    assert len(together.report.clips) == 2 and together.report.settings["svi"]

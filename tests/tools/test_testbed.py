"""The test bed draws what its captions say, and its folders are what the engine's commands take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.testbed import full_runs
from tools.testbed.__main__ import main
from tools.testbed.folders import without_image
from wan_core.checkpoint import load_dit
from wan_core.cli import main as wancore
from wan_core.config import LoadOptions, Request
from wan_core.config.skipping import parse_setting
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.plan import Plan
from wan_lab.run import FULL, Run, make, measure_quality
from wan_lab.samples import Batch, choose_samples

SMALL = ["--size", "64x48", "--frames", "5"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("testbed")
    main(["--to", str(folder), *SMALL, "--samples", "2"])
    return folder


def test_a_text_to_video_file_is_the_image_model_given_nothing(folders: Path):
    image = load_dit(folders / "i2v" / "high_noise_model.safetensors", dtype=torch.float32)
    plain = load_dit(folders / "t2v" / "high_noise_model.safetensors", dtype=torch.float32)
    assert (image.config.in_channels, plain.config.in_channels, plain.config.head_dim) == (36, 16, 128)
    x, text = torch.randn(2, 16, 2, 6, 8), torch.randn(2, 9, 64)
    time = torch.tensor([900.0, 400.0])
    padded = torch.cat([x, torch.zeros(2, 20, 2, 6, 8)], 1)
    assert torch.allclose(plain(x.clone(), time, text), image(padded, time, text), atol=1e-5)
    with torch.no_grad():
        image.head.head.weight.normal_()
    assert not torch.allclose(without_image(image)(x, time, text), plain(x, time, text), atol=1e-3)


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_the_quality_command_takes_its_folders(folders: Path, tmp_path: Path, task: str):
    folder, out = folders / task, tmp_path / "quality.json"
    common = ["--model", str(folder), "--frames", "5", "--steps", "4", "--count", "2", "--batch", "2"]
    common += ["--size", "64x48", "--precision", "fp32", "--device", "cpu", "--setting", "taylorseer:2"]
    samples = ["--samples", str(folder / "samples.jsonl"), "--negative-prompt", ""]
    assert wancore(["quality", *common, *samples, "--out", str(out)]) == 0
    assert 0 < json.loads(out.read_text())["rows"][0]["psnr"] <= 99


def test_full_runs_are_made_once_and_read_the_next_time(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seeds = []

    def count(pipe: Pipeline, batch: Batch, plan: Plan) -> Run:
        seeds.append(batch.samples[0].seed)
        return make(pipe, batch, plan)

    monkeypatch.setattr(full_runs, "make", count)
    samples = choose_samples(None, 2, 0, tiny=True)
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu"))

    def rows(steps: int) -> list[dict[str, Any]]:
        request = Request(prompt="", steps=steps, width=48, height=48, frames=5)
        run = full_runs.FullRuns(tmp_path, {"steps": steps}).run
        settings = {FULL: None, "taylorseer:2": parse_setting("taylorseer:2")}
        return [
            {key: row.get(key) for key in ("name", "psnr", "ssim", "saved")}
            for row in measure_quality(pipe, request, samples, settings, 1, full_run=run).rows()
        ]

    first = rows(2)
    assert len(seeds) == 2
    assert rows(2) == first and len(seeds) == 2
    rows(3)
    assert len(seeds) == 4, "another run is not read for this one"

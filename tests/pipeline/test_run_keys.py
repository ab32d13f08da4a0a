"""The key of kept clips: what changes the numbers of a video changes it, and its clips are made anew.
tests/config/test_keys.py has every option."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from wan_core.config import LoadOptions, LoraOptions, Request
from wan_core.config.table import table
from wan_core.pipeline.clips import kept_latents, run_key
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.run import Run, Watch

TINY = LoadOptions(model="tiny", task="i2v-tiny", device="cpu")
SMALL: dict[str, Any] = {"width": 48, "height": 32, "frames": 13, "clip_frames": 9, "steps": 2, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for seed, name in enumerate(("a.png", "b.png")):
        pixels = np.random.default_rng(seed).integers(0, 255, (32, 48, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
    draw = torch.Generator().manual_seed(0)
    names = [f"blocks.{block}.{name}" for block in range(4) for name in ("self_attn.q", "cross_attn.o")]
    tensors = {f"{name}.lora_A.default.weight": torch.randn(4, 96, generator=draw) * 0.1 for name in names}
    tensors |= {f"{name}.lora_B.default.weight": torch.randn(96, 4, generator=draw) * 0.1 for name in names}
    save_file(tensors, folder / "style.safetensors")
    return folder


def request(folder: Path, **changed: Any) -> Request:
    return Request(**{"prompt": "a red circle", "image": str(folder / "a.png"), "svi": True, **SMALL, **changed})


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return Pipeline.load(TINY).prepare(request(folder))


def test_what_decides_beside_options_changes_the_key(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Versions, the device, and the contents of pictures under their old names; not the time, and not the memory."""
    key = run_key(run)
    run.report.settings["memory"] = {"free": 3}
    assert run_key(run) == key
    for name, value in (("torch.__version__", "9"), ("wan_core.pipeline.clips.__version__", "9")):
        with monkeypatch.context() as patched:
            patched.setattr(name, value)
            assert run_key(run) != key
    with monkeypatch.context() as patched:
        patched.setattr(run.report, "workers", "another card")
        assert run_key(run) != key
    picture = folder / "a.png"
    content = picture.read_bytes()
    picture.write_bytes((folder / "b.png").read_bytes())
    assert run_key(run) != key
    picture.write_bytes(content)
    assert run_key(run) == key


# ------------------------------------------------------------------------------------------------------- whole runs


class Stopped(Exception):
    pass


def interrupted(options: LoadOptions, asked: Request, clips: Path) -> None:
    """A run that ends in its second clip."""

    def on_step(progress: Any, _: float | None) -> None:
        if progress.clip[0] == 2:
            raise Stopped

    with pytest.raises(Stopped):
        Pipeline.load(options).generate(asked, Watch(step=on_step, keep_clips=clips))


def goes_on(options: LoadOptions, asked: Request, clips: Path) -> bool:
    """Whether a run would take the first clip from the folder."""
    run = Pipeline.load(options).prepare(asked)
    [kept] = kept_latents(run, clips, 1)
    return kept.find(run.job.plan, run.job.clip_shape(run.job.clips[0])) is not None


CHANGED: dict[str, Any] = {
    "prompt": "a blue square", "steps": 3, "guidance_low": 2.0, "clip_frames": 13, "match_colours": 0.5, "svi": None,
    "fps": 24, "last_image": "b.png", "lora_mode": "attach", "precision": "bf16",
}  # fmt: skip


def test_a_repeated_run_with_one_option_changed_takes_nothing(folder: Path, tmp_path: Path) -> None:
    options = replace(TINY, loras=(LoraOptions(path=str(folder / "style.safetensors")),), precision="fp8-weights")
    asked = request(folder)
    interrupted(options, asked, tmp_path / "x.clips")
    assert goes_on(options, asked, tmp_path / "x.clips")
    assert goes_on(replace(options, residency="resident", host_memory_limit=64.0), asked, tmp_path / "x.clips")
    for name, value in CHANGED.items():
        changed = {name: str(folder / value) if name == "last_image" else value}
        asked_now, options_now = asked, options
        if name in table(Request):
            asked_now = replace(asked, **changed)
        else:
            options_now = replace(options, **changed)
        assert not goes_on(options_now, asked_now, tmp_path / "x.clips"), name

"""Latents kept while a run goes on: a run that was lost goes on from them, and makes the same video bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wan_core.cli import generate, main
from wan_core.config import LoadOptions, MagCacheOptions, Request, SkipOptions
from wan_core.config.outputs import claim_of
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.pipeline import kept_steps
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.run import Watch

PROMPT = "a red circle moving right on a blue background"
SIZE = {"prompt": PROMPT, "width": 32, "height": 32, "frames": 5, "steps": 8, "seed": 3}
MAGCACHE = SkipOptions(magcache=MagCacheOptions(threshold=0.24, max_skips=1, retention=0.1))


@pytest.fixture(autouse=True)
def after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_steps, "SECONDS", 0.0)


def lost_at(step: int) -> Watch:
    """Ends the run after so many steps."""
    done = []

    def note(*_: Any) -> None:
        done.append(1)
        if len(done) == step:
            raise ConnectionError("lost")

    return Watch(step=note)


@pytest.mark.parametrize(
    ("more", "lost"),
    [({}, 6), ({"solver": "unipc"}, 3), ({"solver": "heun"}, 3), ({"solver": "lcm"}, 6), ({"solver": "dpm++"}, 6),
     ({"solver": "res_multistep"}, 6), ({"skip": MAGCACHE}, 3), ({"skip": MAGCACHE}, 6), ({"guidance_high": 1.0}, 6)],
    ids=str,
)  # fmt: skip
def test_a_run_that_was_lost_goes_on(pipe: Pipeline, tmp_path: Path, more: dict[str, Any], lost: int) -> None:
    again, begin = resumed(pipe, Request(**SIZE, **more), lost, tmp_path)
    steps, changes = again.plan.steps, {phase[0].index for phase in again.plan.phases}
    assert begin == lost or (0 < begin < lost and any(step.skipped for step in steps) and begin in changes)
    assert f"an earlier run made the first {begin} of {len(steps)} steps" in again.report.notes


def resumed(pipe: Pipeline, request: Request, lost: int, kept: Path) -> tuple[Any, int]:
    """A run that goes on after one that ended after `lost` steps, and where it began. It gives what one run gives."""
    whole = pipe.generate(request)
    with pytest.raises(ConnectionError):
        pipe.generate(request, replace(lost_at(lost), keep_clips=kept))
    steps: list[int] = []
    again = pipe.generate(request, Watch(step=lambda done, _: steps.append(done.step.index), keep_clips=kept))
    assert torch.equal(again.latents, whole.latents) and steps == list(range(steps[0], len(whole.plan.steps)))
    return again, steps[0]


@pytest.mark.parametrize("lost", [1, 4, 6])
def test_scales_of_earlier_steps_are_not_left_out(lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With delayed FP8 a run goes on from the first step of an expert, whose scales are new there."""
    on_cpu = replace(SCHEMES["te-delayed"], why_not=lambda device: None)  # the recipe's arithmetic on a CPU
    monkeypatch.setitem(SCHEMES, "te-delayed", on_cpu)
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", precision="te-delayed"))
    again, begin = resumed(pipe, Request(**SIZE), lost, tmp_path)
    assert begin == max(phase[0].index for phase in again.plan.phases if phase[0].index <= lost)


@pytest.mark.parametrize("change", [{"seed": 4}, {"shift": 4.0}, {"prompt": "a blue square"}, {"guidance_high": 2.0}])
def test_another_run_does_not_use_it(pipe: Pipeline, tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(ConnectionError):
        pipe.generate(Request(**SIZE), replace(lost_at(4), keep_clips=tmp_path))
    request = Request(**{**SIZE, **change})
    assert torch.equal(pipe.generate(request, Watch(keep_clips=tmp_path)).latents, pipe.generate(request).latents)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "folder", "step", "shape"])
def test_a_damaged_file_counts_for_nothing(pipe: Pipeline, tmp_path: Path, damage: str) -> None:
    request = Request(**SIZE)
    with pytest.raises(ConnectionError):
        pipe.generate(request, replace(lost_at(4), keep_clips=tmp_path))
    [path] = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    if damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage in ("step", "shape"):
        tensor, _, settings = kept_steps.load_latents(path)
        numbers = [8, *settings["numbers"][1:]] if damage == "step" else [settings["numbers"][0], 7, 7, 0]
        path.unlink()
        kept_steps.try_to_save_latents(path, tensor, 1, {**settings, "numbers": numbers})
    else:
        content[-9] ^= 255
        path.write_bytes({"cut": content[:-9], "changed": content, "empty": b""}[damage])
    again = pipe.generate(request, Watch(keep_clips=tmp_path))
    assert torch.equal(again.latents, pipe.generate(request).latents)
    assert not any("an earlier run made" in note for note in again.report.notes)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_command_goes_on_and_leaves_nothing(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """elsewhere: the run was lost with its container, whose claim may be of one that runs."""
    out = tmp_path / "x.mp4"
    words = ["generate", "--model", "tiny", "--prompt", PROMPT, "--size", "32x32", "--frames", "5", "--steps", "6"]
    usual = generate.watching
    monkeypatch.setattr(generate, "watching", lambda *given: replace(usual(*given), step=lost_at(4).step))
    assert main([*words, "--out", str(out)]) == 2
    assert "the same command goes on from it" in capsys.readouterr().err and (tmp_path / "x.clips").is_dir()
    monkeypatch.setattr(generate, "watching", usual)
    claimed, made = ("x-1.mp4", [".claim", ".mp4"]) if elsewhere else ("x.mp4", [".mp4"])
    if elsewhere:
        claim_of(out).write_text("0123abcd-7-01234567")
    assert main([*words, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "an earlier run made the first 4 of 6 steps" in said and said.endswith(f"{tmp_path / claimed}\n")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == made

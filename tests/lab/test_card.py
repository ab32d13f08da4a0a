"""The report card: what it says and does not say, what it does where videos do not fit or a run is broken off."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from wan_core.cli import main
from wan_core.config import SPEEDS, OptionError
from wan_core.config.outputs import Outputs
from wan_core.execution.report import Phase, Report
from wan_core.media.pictures import Canvas
from wan_core.pipeline.sources import TINY
from wan_core.sampling.plan import make_plan
from wan_lab import card as card_module
from wan_lab import pictures
from wan_lab.card import card_settings, make_card
from wan_lab.card_page import FULL, Video
from wan_lab.samples import Sample

CPU = torch.device("cpu")
SAMPLES = [Sample("waves", 1), Sample("dogs", 2)]


class DrawnMaker:
    """Videos of noise, and reports as of a GPU. fits: frames that fit. odd: settings of the reports besides."""

    def __init__(self, fits: int = 81, **odd: Any) -> None:
        self.fits, self.odd, self.made, self.fail = fits, odd, [], {}

    def plan(self, skip, frames):
        if "plan" in self.fail and skip == self.fail["plan"]:
            raise OptionError("/home/me/model.safetensors is step-distilled")
        return make_plan()

    def forward_seconds(self, frames):
        if frames > self.fits:
            raise torch.cuda.OutOfMemoryError("out of memory")
        return 0.5

    def make(self, sample, skip, frames):
        self.made.append((sample.caption, skip, frames))
        if fault := self.fail.get(len(self.made)):
            raise fault
        pixels = torch.randint(0, 255, (frames, 32, 48, 3), generator=torch.Generator().manual_seed(len(self.made)))
        said = {"task": "t2v-A14B", "size": [48, 32], "frames": frames, "steps": 40, "precision": {"high": "fp8"}}
        phases = {"load": Phase(9.0, 9 * 2**30), "denoise high": Phase(1.0, 2**31, 4), "text": Phase(0.0)}
        return pixels.byte(), Report(CPU, {**said, **self.odd}, phases)


def small_card(maker: DrawnMaker, out: Path, samples=SAMPLES, prompts: bool = False, frames: int = 9):
    """The text of a card, and what was told."""
    told: list[str] = []
    with Outputs({}) as outputs:
        size = 48, 32, frames
        settings = card_settings()
        text, _, files = make_card(maker, samples, settings, size, CPU, out, outputs, told.append, maker.odd, prompts)
    assert files[0].read_text() == text
    return text, told


def test_a_card_has_a_row_for_each_setting_and_says_before_how_long_it_takes(tmp_path: Path):
    text, told = small_card(DrawnMaker(), tmp_path)
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert next(iter(rows)) == "setting" and list(rows)[2:] == [FULL, *SPEEDS[1:]]
    assert rows["fast"].endswith("| 2.0 |"), "the peak of the run, not of loading"
    assert "about 5:20 min by a timed forward of 0.5 s" in told[0], "2 x 4 videos of 80 forwards"
    assert told[-1].endswith("done") and {*os.listdir(tmp_path)} == {
        f"report-card.{ending}" for ending in ("json", "md", "png")
    }
    with Image.open(tmp_path / "report-card.png") as picture:
        assert picture.size[0] == 4 * 240 and not picture.info
    small_card(DrawnMaker(), tmp_path)
    assert (tmp_path / "report-card-1.md").exists() and "(report-card-1.png)" in (
        tmp_path / "report-card-1.md"
    ).read_text()


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_a_card_that_was_broken_off_goes_on(tmp_path: Path, stop: int):
    maker = DrawnMaker()
    maker.fail[stop] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        small_card(maker, tmp_path)
    assert not (tmp_path / "report-card.md").exists() and (tmp_path / ".report-card").exists() == (stop > 1)
    again = DrawnMaker()
    text, told = small_card(again, tmp_path)
    assert len(again.made) == 8 - (stop - 1) and (f"{stop - 1} finished videos are there" in told[0]) == (stop > 1)
    assert not (tmp_path / ".report-card").exists() and "| fast |" in text


# Names that are no part of other words of a card.
ODD = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=4, max_size=30).map(
    lambda name: f"Zq{name}|`<"
)


@given(ODD, ODD, ODD)
def test_a_card_is_the_same_whatever_models_prompts_and_users_are_called(model: str, prompt: str, user: str):
    """A card takes only what is listed from a run's report."""
    odd = {"models": {"high": model}, "prompt": prompt, "image": f"/home/{user}/x.png", "memory": user}
    frames = torch.zeros(1, 16, 16, 3, dtype=torch.uint8)
    usual, named = (
        Video.measured(frames, Report(CPU, {"task": "t2v-A14B", "precision": {"high": "bf16"}, **settings}), 1.0)
        for settings in ({}, odd)
    )
    assert {**named.facts, "host": 0} == {**usual.facts, "host": 0}


def test_no_name_is_in_the_files_of_a_command(tmp_path: Path, monkeypatch, capsys):
    """With the embedded model under an odd name: the files, and every text that is drawn."""
    drawn: list[str] = []
    text, caption = Canvas.text, pictures._caption
    monkeypatch.setattr(
        Canvas,
        "text",
        lambda self, x, y, drawn_text, *more, **how: (
            drawn.append(drawn_text) or text(self, x, y, drawn_text, *more, **how)
        ),
    )
    monkeypatch.setattr(pictures, "_caption", lambda name, *size: drawn.append(name) or caption(name, *size))
    monkeypatch.setenv("USER", "Zqänne")
    monkeypatch.setattr("platform.node", lambda: "Zqhost")
    monkeypatch.setattr("socket.gethostname", lambda: "Zqhost")
    folder = tmp_path / "Zq home" / "Zqmodels"
    folder.mkdir(parents=True)
    names = {"high": "Zq_high", "low": "Zq_low", "vae": "Zqvae", "text-encoder": "Zqtext"}
    files = {"high": "t2v_high", "low": "t2v_low", "vae": "vae", "text-encoder": "text_encoder"}
    command = [
        "report-card",
        "--device",
        "cpu",
        "--task",
        "t2v-tiny",
        "--steps",
        "10",
        "--size",
        "48x48",
        "--frames",
        "1",
    ]
    for option, name in names.items():
        shutil.copy(TINY / f"{files[option]}.safetensors", folder / f"{name}.safetensors")
        command += [f"--{option}", str(folder / f"{name}.safetensors")]
    command += ["--count", "1", "--prompt", "a red circle moving right on a Zqblue background"]
    assert main([*command, "--out", str(tmp_path / "Zqout")]) == 0
    card = (tmp_path / "Zqout" / "report-card.md").read_text()
    said = card + "\n".join(drawn) + (tmp_path / "Zqout" / "report-card.json").read_text()
    assert "Zq" not in said and str(tmp_path) not in said
    assert chunks(tmp_path / "Zqout" / "report-card.png") == {b"IHDR", b"IDAT", b"IEND"}, "no metadata"
    assert all(name in said for name in (FULL, *SPEEDS[1:])) and "about" in capsys.readouterr().err
    monkeypatch.setattr(card_module, "card_settings", lambda: {FULL: None})
    assert main([*command, "--out", str(tmp_path / "Zqout"), "--with-prompts"]) == 0
    assert "- prompt 1: a red circle moving right on a Zqblue" in (tmp_path / "Zqout" / "report-card-1.md").read_text()


def chunks(path: Path) -> set[bytes]:
    """The kinds of chunks of a PNG file."""
    content, place, kinds = path.read_bytes(), 8, set()
    while place < len(content):
        kinds.add(content[place + 4 : place + 8])
        place += 12 + int.from_bytes(content[place : place + 4], "big")
    return kinds

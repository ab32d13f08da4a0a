"""Every command of the README and the docs that a CPU without a network can run is run, on stand-ins of the weights.

    make documented

The stand-ins have the names and folders of the README's tables (`tests/stand_ins.py`). Commands stay as they are, but
for what makes them small: see `on_a_cpu`.
"""

from __future__ import annotations

import os
import re
import shutil
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.documented import (
    ROOT,
    Command,
    commands,
    fences,
    reason_not_run,
    releases_of,
    weight_rows,
    weights_section,
)
from tests.stand_ins import config_of, folder_of, write_release, write_stand_in
from wan_core.cli import main
from wan_core.media.mp4 import write_mp4
from wan_core.media.video import read_video
from wan_core.ops.attention.registry import BACKENDS

pytestmark = pytest.mark.documented

SECTION = weights_section((ROOT / "README.md").read_text(encoding="utf-8"))
COMFY_ORG = weight_rows(SECTION.partition("**2. ")[0])
ROWS = weight_rows(SECTION)
FOLDERS = {"parallel.md": "Wan2.2-TI2V-5B"}  # what FOLDER is on a page: its list has texts and pictures
WEIGHTS = ("--high", "--low", "--text-encoder", "--vae", "--clip-vision", "--audio-encoder", "--model", "--task")
MEDIA = {"image", "last-image", "reference", "pose-video", "face-video", "background", "mask", "control-video", "audio"}
OUTPUTS = {"out", "plot", "video", "sheet", "report", "save-latents"}
SMALLER = {"--size": "64x64", "--frames": "5", "--count": "1", "--gpus": "cpu,cpu"}
RUN_MODELS = ("generate", "warmup", "calibrate", "quality", "search")


def different() -> dict[str, Command]:
    """The commands that are run, one of those that are the same, by place."""
    found = {tuple(one.own): one for one in reversed(commands()) if reason_not_run(one) is None and one.own}
    return {one.place: one for one in reversed(found.values())}


COMMANDS = different()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files and releases of the README's tables, and `ComfyUI/models` with those of Comfy-Org alone."""
    folder = tmp_path_factory.mktemp("weights")
    for name in {name for row in ROWS for name in row}:
        path = folder / folder_of(name) / name
        write_stand_in(path)
        if any(name in row for row in COMFY_ORG):
            there = folder / "ComfyUI/models" / folder_of(name) / name
            there.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, there)
    for name in releases_of(SECTION):
        write_release(folder / name.partition("/")[2])
    return folder


@pytest.fixture(scope="module")
def places(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"weights": weights, "root": tmp_path_factory.mktemp("pages")}


def enter(page: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the commands of a page are run, one after the other."""
    folder = places["root"] / page
    if not folder.exists():
        shutil.copytree(places["weights"], folder, copy_function=os.link)
        (folder / "wan_core").symlink_to(ROOT / "wan_core")
        (folder / "FOLDER").symlink_to(FOLDERS.get(page, "Wan2.2-T2V-A14B"))
        (folder / "FILE").symlink_to(next((folder / "diffusion_models").glob("*t2v_high*.safetensors")))
        write_list(page, folder)
    monkeypatch.chdir(folder)
    return folder


def write_list(page: str, folder: Path) -> None:
    """The list of videos that a page shows as JSON, smaller."""
    shown = next((ROOT.rglob(page)), ROOT / "README.md") if page == "parallel.md" else None
    if shown is None:
        return
    [lines] = [text for language, text, _ in fences(shown.read_text(encoding="utf-8")) if language == "json"]
    smaller = re.sub(r'"size": "\d+x\d+", "frames": \d+', '"size": "64x64", "frames": 5', lines)
    (folder / "list.jsonl").write_text(smaller)
    draw_picture(folder / "cat.png")


# ------------------------------------------------------------------------------------------------------------ smaller


def on_a_cpu(words: list[str]) -> list[str]:
    """The same command, small enough for a CPU: one video of 64x64 and 5 frames where the weights are not the embedded
    model's, and no GPU. An attention kernel that needs a GPU is left to `auto`."""
    if words[0] not in RUN_MODELS:
        return words
    found = [SMALLER[before] if before in SMALLER else word for before, word in zip(["", *words], words, strict=False)]
    if "--attention" in found:
        name = found.index("--attention") + 1
        if found[name] in BACKENDS and BACKENDS[found[name]].why_not(torch.device("cpu"), torch.float32):
            found[name] = "auto"
    if "tiny" not in found:
        found += [word for name in ("--size", "--frames") if name not in found for word in (name, SMALLER[name])]
    if words[0] in ("quality", "search", "calibrate") and "--count" not in found:
        found += ["--count", "1"]
    return found if "--gpus" in found else [*found, "--device", "cpu"]


def given(words: list[str], names: set[str]) -> list[Path]:
    return [Path(word) for before, word in zip(words, words[1:], strict=False) if before.removeprefix("--") in names]


def draw_picture(path: Path, frames: int = 1) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (frames, 64, 64, 3), dtype=np.uint8)
    if path.suffix == ".mp4":
        write_mp4(path, pixels, fps=16)
    else:
        Image.fromarray(pixels[0]).save(path)


def make_media(words: list[str]) -> None:
    for path in given(words, MEDIA):
        if path.suffix in (".wav", ".mp3"):
            with wave.open(str(path), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(16000)
                file.writeframes(np.random.default_rng(0).integers(-9000, 9000, 8000, dtype=np.int16).tobytes())
        else:
            draw_picture(path, 9)


def run(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Run our command line in this folder; what it printed. What it is told to write must be there."""
    make_media(words)
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}
    code = main(on_a_cpu(words))
    printed = capfd.readouterr()
    assert code == 0, printed.err[-2000:]
    written = [path for path in Path().rglob("*") if path.is_file() and before.get(path) != path.stat().st_mtime_ns]
    for path in given(words, OUTPUTS):
        mine = [one for one in written if one.parent == path.parent and one.suffix == path.suffix or path in one.parents]
        assert mine and all(one.stat().st_size for one in mine), f"{path} is not among {written}"
    for path in written:
        if path.suffix == ".mp4":
            assert read_video(path).shape[0] > 1
    return printed.out + printed.err


# -------------------------------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize("place", COMMANDS)
def test_a_command_runs(place: str, places: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    command = COMMANDS[place]
    words = command.own
    assert words is not None
    enter(command.page, places, monkeypatch)
    if "Wan-AI/Wan2.2-T2V-A14B" in words:  # "prints the command that downloads it"
        monkeypatch.chdir(places["root"])
        assert main(words) == 2 and "`hf download Wan-AI/Wan2.2-T2V-A14B --local-dir" in capfd.readouterr().err
        return
    assert run(words, capfd)


# -------------------------------------------------------------------------------------------------------- weights


def example(kind: object) -> list[str]:
    """The first command of the pages for such a transformer, without its weights and its output."""
    for command in COMMANDS.values():
        words = command.own or []
        model = next(iter(given(words, {"high", "task"})), None)
        if words[0] == "generate" and model is not None and config_of(model.name) is kind:
            pairs = [(a, b) for a, b in zip(words[1::2], words[2::2], strict=True)]
            return ["generate", *(word for pair in pairs if pair[0] not in (*WEIGHTS, "--out") for word in pair)]
    raise LookupError(f"no command is documented for {kind}")

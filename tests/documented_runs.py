"""Where and how the commands of the README and the docs are run: folders with stand-ins of the weights and of the media
that they name, and what makes a command small enough for a CPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import wave
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.documented import MODELS, ROOT, fences, folder_of, releases_of, weight_rows, weights_section
from tests.stand_ins import write_release, write_stand_in
from wan_core.cli import main
from wan_core.media.mp4 import write_mp4
from wan_core.media.video import read_video
from wan_core.ops.attention.registry import BACKENDS

SECTION = weights_section(MODELS.read_text(encoding="utf-8"))
COMFY_ORG = weight_rows(SECTION.partition("**2. ")[0])
ROWS = weight_rows(SECTION)
FOLDERS = {"parallel.md": "Wan2.2-TI2V-5B"}  # what FOLDER is on a page: its list has texts and pictures
MEDIA = {"image", "last-image", "reference", "pose-video", "face-video", "background", "mask", "control-video", "audio"}
OUTPUTS = {"out", "plot", "video", "report", "save-latents"}
SMALLER = {"--size": "64x64", "--frames": "5", "--count": "1", "--gpus": "cpu,cpu"}
RUN_MODELS = ("generate", "warmup", "calibrate", "quality", "report-card")


def write_weights(folder: Path) -> None:
    """All files and releases of the tables of docs/models.md, and `ComfyUI/models` with the transformers of
    Comfy-Org alone."""
    for name in {name for row in ROWS for name in row}:
        path = folder / folder_of(name) / name
        write_stand_in(path)
        plain = any(name in row for row in COMFY_ORG) and "inpaint" not in name  # of the same task as image-to-video
        if plain or folder_of(name) == "loras":
            there = folder / "ComfyUI/models" / folder_of(name) / name
            there.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, there)
    for name in releases_of(SECTION):
        write_release(folder / name.partition("/")[2])


def make_page(folder: Path, weights: Path) -> None:
    """The folder where the commands of a page are run, with what the page names: `FOLDER`, `FILE`, and the list of
    videos that it shows."""
    shutil.copytree(weights, folder, copy_function=os.link)
    (folder / "wan_core").symlink_to(ROOT / "wan_core")
    (folder / "FOLDER").symlink_to(FOLDERS.get(folder.name, "Wan2.2-T2V-A14B"))
    (folder / "FOLDER/t2v").symlink_to(".")
    (folder / "FILE").symlink_to(next((folder / "diffusion_models").glob("*t2v_high*.safetensors")))
    if folder.name == "parallel.md":
        blocks = fences((ROOT / "docs" / folder.name).read_text(encoding="utf-8"))
        [lines] = [text for language, text, _ in blocks if language == "json"]
        smaller = re.sub(r'"size": "\d+x\d+", "frames": \d+', '"size": "64x64", "frames": 5', lines)
        (folder / "list.jsonl").write_text(smaller)
        for video in map(json.loads, lines.splitlines()):
            make_media([word for name, value in video.items() for word in (f"--{name}", str(value))], folder)


def on_a_cpu(arguments: list[str]) -> list[str]:
    """The same command, small enough for a CPU: one video of 64x64 and 5 frames where the weights are not the embedded
    model's, and no GPU. The memory of one is 24 GiB. An attention kernel that needs a GPU is left to `auto`."""
    if arguments[0] == "plan" and "--memory" in arguments:
        return [*arguments, "--memory-limit", "24"]
    if arguments[0] not in RUN_MODELS:
        return arguments
    smaller = SMALLER | ({"--frames": "9"} if "--svi" in arguments else {})  # more than the overlap of its clips
    changed = [smaller.get(before, word) for before, word in pairwise(["", *arguments])]
    if "--attention" in changed:
        name = changed.index("--attention") + 1
        if changed[name] in BACKENDS and BACKENDS[changed[name]].why_not(torch.device("cpu"), torch.float32):
            changed[name] = "auto"
    if "tiny" not in changed:
        changed += [word for name in ("--size", "--frames") if name not in changed for word in (name, SMALLER[name])]
    if arguments[0] in ("quality", "calibrate", "report-card") and "--count" not in changed:
        changed += ["--count", "1"]
    return changed if "--gpus" in changed else [*changed, "--device", "cpu"]


def paths_after(arguments: list[str], names: set[str]) -> list[Path]:
    return [Path(word) for before, word in pairwise(arguments) if before.removeprefix("--") in names]


def draw_picture(path: Path, frames: int = 1) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (frames, 64, 64, 3), dtype=np.uint8)
    if path.suffix == ".mp4":
        write_mp4(path, pixels, fps=16)
    else:
        Image.fromarray(pixels[0]).save(path)


def make_media(arguments: list[str], folder: Path = Path()) -> None:
    """The pictures, videos and sounds that a command is given, and its list of samples."""
    for path in paths_after(arguments, {"samples"}):
        path.write_text('{"prompt": "a red circle"}\n')
    for path in (folder / name for name in paths_after(arguments, MEDIA)):
        if path.suffix in (".wav", ".mp3"):
            with wave.open(str(path), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(16000)
                file.writeframes(np.random.default_rng(0).integers(-9000, 9000, 8000, dtype=np.int16).tobytes())
        else:
            draw_picture(path, 9)


def run(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Run our command line in this folder; what it printed. What it is told to write must be there."""
    make_media(arguments)
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}
    code = main(on_a_cpu(arguments))
    printed = capfd.readouterr()
    assert code == 0, printed.err[-2000:]
    written = [path for path in Path().rglob("*") if path.is_file() and before.get(path) != path.stat().st_mtime_ns]
    written = [path.resolve() for path in written]
    for path in (named.resolve() for named in paths_after(arguments, OUTPUTS)):
        mine = [
            one for one in written if (one.parent == path.parent and one.suffix == path.suffix) or path in one.parents
        ]
        assert mine and all(one.stat().st_size for one in mine), f"{path} is not among {written}"
    assert all(len(read_video(path)) > 1 for path in written if path.suffix == ".mp4")
    if arguments[0] == "calibrate":  # "kept beside the checkpoint"
        assert any(path.suffix == ".json" and Path(arguments[2]).resolve() in path.parents for path in written)
    return printed.out + printed.err

"""Every command of the README and the docs that a CPU without a network can run is run, on stand-ins of the weights.

    make documented

The stand-ins have the names and folders of the README's tables (`tests/stand_ins.py`). Commands stay as they are, but
for what makes them small: see `on_a_cpu`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
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
    folder_of,
    reason_not_run,
    releases_of,
    weight_rows,
    weights_section,
)
from tests.stand_ins import config_of, write_release, write_stand_in
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
    found = {tuple(one.own or [one.page, one.text]): one for one in reversed(commands()) if reason_not_run(one) is None}
    return {one.place: one for one in reversed(found.values())}


COMMANDS = different()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files and releases of the README's tables, and `ComfyUI/models` with those of Comfy-Org alone."""
    folder = tmp_path_factory.mktemp("weights")
    for name in {name for row in ROWS for name in row}:
        path = folder / folder_of(name) / name
        write_stand_in(path)
        if any(name in row for row in COMFY_ORG) and "inpaint" not in name:  # of the same task as image-to-video
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
        (folder / "FOLDER/t2v").symlink_to(".")
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
    model's, and no GPU. The memory of one is 24 GiB. An attention kernel that needs a GPU is left to `auto`."""
    if words[0] == "plan" and "--memory" in words:
        return [*words, "--memory-limit", "24"]
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
    for path in given(words, {"samples"}):
        path.write_text('{"prompt": "a red circle"}\n')
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
    if words is None:
        subprocess.run(["bash", "-c", command.text], check=True, cwd=enter(command.page, places, monkeypatch))
        return
    enter(command.page, places, monkeypatch)
    if "Wan-AI/Wan2.2-T2V-A14B" in words:  # "prints the command that downloads it"
        monkeypatch.chdir(places["root"])
        assert main(words) == 2 and "`hf download Wan-AI/Wan2.2-T2V-A14B --local-dir" in capfd.readouterr().err
        return
    assert run(words, capfd)


# ------------------------------------------------------------------------------------------------- every row of weights


def example(model: str) -> list[str]:
    """The first command of the pages for such a model, without its weights and its output."""
    for command in COMMANDS.values():
        words = command.own or []
        named = next(iter(given(words, {"high", "task"})), None)
        if words[0] == "generate" and named is not None and config_of(named.name) is config_of(model):
            pairs = zip(words[1::2], words[2::2], strict=True)
            return ["generate", *(word for pair in pairs if pair[0] not in (*WEIGHTS, "--out") for word in pair)]
    raise LookupError(f"no command is documented for {model}")


def parts(model: str, text_encoder: str = "umt5_xxl_fp8_e4m3fn_scaled.safetensors") -> list[str]:
    """What the README says a model needs beside its transformers."""
    found = {"--text-encoder": text_encoder, "--vae": "wan_2.1_vae.safetensors"}
    if (config := config_of(model)).out_channels == 48:
        found["--vae"] = "wan2.2_vae.safetensors"
    if config.image_dim is not None:
        found["--clip-vision"] = "clip_vision_h.safetensors"
    if config.family == "s2v":
        found["--audio-encoder"] = "wav2vec2_large_english_fp16.safetensors"
    return [word for option, name in found.items() for word in (option, f"{folder_of(name)}/{name}")]


def models_of(rows: list[list[str]], folder: str) -> list[tuple[str, ...]]:
    """The files of each model, or of each pair of LoRAs: two experts, or one file alone."""
    found: list[tuple[str, ...]] = []
    for row in rows:
        names = [name for name in row if folder_of(name) == folder]
        pair = bool(names) and "high" in names[0].lower()
        found += [tuple(names)] if pair else [(name,) for name in names]
    return found


def experts(names: tuple[str, ...], *options: str) -> list[str]:
    return [word for option, name in zip(options, names, strict=False) for word in (option, f"{folder_of(name)}/{name}")]


@pytest.mark.parametrize("names", models_of(ROWS, "diffusion_models"), ids=lambda names: names[0])
def test_every_transformer_of_the_tables(names: tuple[str, ...], places, monkeypatch, capfd) -> None:
    enter("README.md", places, monkeypatch)
    encoder = ["umt5-xxl-encoder-Q8_0.gguf"] if names[0].endswith("gguf") else []
    words = [*example(names[0]), *experts(names, "--high", "--low"), *parts(names[0], *encoder), "--out", "row.mp4"]
    assert "swapped" not in run(words, capfd)


@pytest.mark.parametrize("names", models_of(ROWS, "loras"), ids=lambda names: names[0])
def test_every_lora_of_the_tables(names: tuple[str, ...], places, monkeypatch, capfd) -> None:
    enter("README.md", places, monkeypatch)
    kind = "i2v" if "i2v" in names[0] else "t2v"
    of = next(model for model in models_of(COMFY_ORG, "diffusion_models") if f"_{kind}_" in model[0])
    loras = experts(names, "--lora-high", "--lora-low")
    words = [*example(of[0]), *experts(of, "--high", "--low"), *parts(of[0]), *loras, "--out", "four.mp4"]
    run([*words, "--report", "four.json", "--overwrite"], capfd)
    made = json.loads(Path("four.json").read_text())["settings"]
    assert (made["steps"], made["solver"], made["shift"], set(made["guidance"].values())) == (4, "euler", 5, {1})


@pytest.mark.parametrize("name", releases_of(SECTION))
def test_every_release_of_the_tables(name: str, places, monkeypatch, capfd) -> None:
    enter("README.md", places, monkeypatch)
    run([*example(name), "--model", name.partition("/")[2], "--out", "release.mp4"], capfd)


TASKS = ("t2v-A14B", "i2v-A14B", "ti2v-5B", "animate-14B", "s2v-14B", "vace-14B", "fun-control-A14B", "camera-A14B")


@pytest.mark.parametrize("task", TASKS)
def test_every_model_is_found_in_the_models_folder(task: str, places, monkeypatch, capfd) -> None:
    """`--model ComfyUI/models --task TASK` finds the files by itself."""
    enter("README.md", places, monkeypatch)
    run([*example(task), "--model", "ComfyUI/models", "--task", task, "--out", "found.mp4"], capfd)

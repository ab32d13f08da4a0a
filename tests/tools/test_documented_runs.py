"""Every command of the README and the docs that a CPU without a network can run is run, on stand-ins of the weights.

    make documented

The stand-ins have the names and folders of the tables of docs/models.md (`tests/stand_ins.py`). Commands stay as they
are, but for what makes them small (`on_a_cpu` in `tests/documented_runs.py`). `RULES` in `tests/documented.py` says
which are not run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.__main__ import main as measure
from tests.documented import (
    BENCHMARKS,
    PAGES,
    ROOT,
    Command,
    commands,
    fences,
    folder_of,
    option_spans,
    reason_not_run,
    releases_of,
)
from tests.documented_runs import COMFY_ORG, ROWS, SECTION, make_page, paths_after, run, write_weights
from tests.stand_ins import config_of
from wan_core.cli import main

pytestmark = pytest.mark.documented

WEIGHTS = ("--high", "--low", "--text-encoder", "--vae", "--clip-vision", "--audio-encoder", "--model", "--task")
Enter = Callable[[str], Path]


def different() -> dict[str, Command]:
    """The commands that are run, one of those that are the same, by place."""
    distinct = {
        tuple(one.own or [one.page, one.text]): one for one in reversed(commands()) if reason_not_run(one) is None
    }
    return {one.place: one for one in reversed(distinct.values())}


COMMANDS = different()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    write_weights(folder)
    return folder


@pytest.fixture
def enter(weights: Path, monkeypatch: pytest.MonkeyPatch) -> Enter:
    """Goes to the folder of a page, where what its commands wrote before is."""

    def enter(page: str) -> Path:
        folder = weights.with_name(f"{weights.name}-pages") / page
        if not folder.exists():
            make_page(folder, weights)
        monkeypatch.chdir(folder)
        return folder

    return enter


@pytest.mark.parametrize("place", COMMANDS)
def test_a_command_runs(place: str, enter: Enter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    command = COMMANDS[place]
    arguments, measurement = command.own, BENCHMARKS.match(command.text)
    folder = enter(command.page)
    if measurement is not None:
        assert measure(shlex.split(measurement[1])) == 0
    elif arguments is None:
        subprocess.run(["bash", "-c", command.text], check=True)
    elif "Wan-AI/Wan2.2-T2V-A14B" in arguments:  # "prints the command that downloads it"
        monkeypatch.chdir(tmp_path)
        assert main(arguments) == 2 and "`hf download Wan-AI/Wan2.2-T2V-A14B --local-dir" in capfd.readouterr().err
    else:
        assert run(arguments, capfd)
    if arguments is not None and "--prompts" in arguments:
        [page] = [page.read_text(encoding="utf-8") for page in PAGES if page.name == command.page]
        named = re.findall(r"[`\"](out/[\w-]+\.[\w.]+)[`\"]", page)
        assert len(named) > 2 and all((folder / name).is_file() for name in named)


def whole_options() -> list[str]:
    """The options that the recipes and docs/trouble.md name with their values."""
    pages = (ROOT / "docs/choices.md", ROOT / "docs/trouble.md")
    spans = dict.fromkeys(span for page in pages for span in option_spans(page))
    return [span for span in spans if len(shlex.split(span)) % 2 == 0]


@pytest.mark.parametrize("span", whole_options())
def test_options_in_the_text_run(span: str, enter: Enter, capfd) -> None:
    """The recipes, and what is to be tried when something goes wrong."""
    enter("commands.md")
    run(["generate", "--model", "Wan2.2-T2V-A14B", "--prompt", "x", *shlex.split(span)], capfd)


def test_what_the_page_installs_runs_in_a_shell(tmp_path: Path) -> None:
    """`pip install .`, and the commands that need no weights, as they stand there. Nothing is downloaded: what WanCore
    needs is in the environment."""
    blocks = [text for _, text, _ in fences((ROOT / "docs/install.md").read_text(encoding="utf-8"))]
    install, first = (next(text for text in blocks if part in text) for part in ("pip install .\n", "--model tiny"))
    source, installed = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements.txt"):
        shutil.copy(ROOT / name, source)
    for package in ("wan_core", "wan_lab"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    offline = f"install -q --no-index --no-deps --no-build-isolation --target {installed}"
    install = install.replace("pip install", f"{sys.executable} -m pip {offline}")
    place = {"PATH": f"{installed}/bin:{os.environ['PATH']}", "PYTHONPATH": str(installed)}
    script = f"cd source\n{install}cd ..\n{first}"
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=os.environ | place, check=True)
    assert {"circle.mp4", "square.mp4"} <= {path.name for path in tmp_path.iterdir()}


# ------------------------------------------------------------------------------------------------- every row of weights


def example(model: str) -> list[str]:
    """The first command of the pages for such a model, without its weights and its output."""
    for command in COMMANDS.values():
        arguments = command.own or []
        named = next(iter(paths_after(arguments, {"high", "task"})), None)
        if arguments[:1] == ["generate"] and named is not None and config_of(named.name) is config_of(model):
            pairs = zip(arguments[1::2], arguments[2::2], strict=True)
            return ["generate", *(word for pair in pairs if pair[0] not in (*WEIGHTS, "--out") for word in pair)]
    raise LookupError(f"no command is documented for {model}")


def parts(model: str, text_encoder: str = "umt5_xxl_fp8_e4m3fn_scaled.safetensors") -> list[str]:
    """What docs/models.md says a model needs beside its transformers."""
    files = {"--text-encoder": text_encoder, "--vae": "wan_2.1_vae.safetensors"}
    if (config := config_of(model)).out_channels == 48:
        files["--vae"] = "wan2.2_vae.safetensors"
    if config.image_dim is not None:
        files["--clip-vision"] = "clip_vision_h.safetensors"
    if config.family == "s2v":
        files["--audio-encoder"] = "wav2vec2_large_english_fp16.safetensors"
    return [word for option, name in files.items() for word in (option, f"{folder_of(name)}/{name}")]


def models_of(rows: list[list[str]], folder: str) -> list[tuple[str, ...]]:
    """The files of each model, or of each pair of LoRAs: two experts, or one file alone."""
    names_of_rows: list[tuple[str, ...]] = []
    for row in rows:
        names = [name for name in row if folder_of(name) == folder]
        pair = bool(names) and "high" in names[0].lower()
        names_of_rows += [tuple(names)] if pair else [(name,) for name in names]
    return names_of_rows


def experts(names: tuple[str, ...], *options: str) -> list[str]:
    return [
        word for option, name in zip(options, names, strict=False) for word in (option, f"{folder_of(name)}/{name}")
    ]


@pytest.mark.parametrize("names", models_of(ROWS, "diffusion_models"), ids=lambda names: names[0])
def test_every_transformer_of_the_tables(names: tuple[str, ...], enter: Enter, capfd) -> None:
    enter("commands.md")
    encoder = ["umt5-xxl-encoder-Q8_0.gguf"] if names[0].endswith("gguf") else []
    arguments = [*example(names[0]), *experts(names, "--high", "--low"), *parts(names[0], *encoder), "--out", "row.mp4"]
    assert "swapped" not in run(arguments, capfd)


@pytest.mark.parametrize(
    "names", [one for one in models_of(ROWS, "loras") if "SVI" not in one[0]], ids=lambda one: one[0]
)
def test_every_lora_for_four_steps_of_the_tables(names: tuple[str, ...], enter: Enter, capfd) -> None:
    enter("commands.md")
    kind = "i2v" if "i2v" in names[0] else "t2v"
    of = next(model for model in models_of(COMFY_ORG, "diffusion_models") if f"_{kind}_" in model[0])
    loras = [f"--lora={expert}={folder_of(name)}/{name}" for expert, name in zip(("high", "low"), names, strict=False)]
    arguments = [*example(of[0]), *experts(of, "--high", "--low"), *parts(of[0]), *loras, "--out", "four.mp4"]
    run([*arguments, "--report", "four.json", "--overwrite"], capfd)
    settings = json.loads(Path("four.json").read_text())["settings"]
    assert (settings["steps"], settings["solver"], settings["shift"], set(settings["guidance"].values())) == (
        4,
        "euler",
        5,
        {1},
    )


@pytest.mark.parametrize("name", releases_of(SECTION))
def test_every_release_of_the_tables(name: str, enter: Enter, capfd) -> None:
    enter("commands.md")
    run([*example(name), "--model", name.partition("/")[2], "--out", "release.mp4"], capfd)


TASKS = ("t2v-A14B", "i2v-A14B", "ti2v-5B", "animate-14B", "s2v-14B", "vace-14B", "fun-control-A14B", "camera-A14B")


@pytest.mark.parametrize("task", TASKS)
def test_every_model_is_found_in_the_models_folder(task: str, enter: Enter, capfd) -> None:
    """`--model ComfyUI/models --task TASK` finds the files by itself."""
    enter("commands.md")
    run([*example(task), "--model", "ComfyUI/models", "--task", task, "--out", "found.mp4"], capfd)

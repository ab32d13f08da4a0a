"""The jobs of the ladder, most valuable first: what each runs, what it needs, and which table it fills.

`{scratch}` in a command is the folder for model files, `{disk}` one that is not in memory, `{out}` where the result
goes. Seconds are estimates for one H100 with the files of FILES written; they decide what still fits into the time.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Job:
    """name: of its result file. table: what its rows fill. command: arguments of Python. seconds: an estimate, without
    the model files. files: a key of FILES. needs: what must be there, by the keys of NEEDS."""

    name: str
    table: str
    command: str
    seconds: int
    gpus: int = 1
    files: str = ""
    needs: tuple[str, ...] = ()

    def words(self, scratch: Path, out: Path, *, cpu: bool) -> list[str]:
        words = shlex.split(self.command)
        paths = {"{scratch}": str(scratch), "{out}": str(out), "{disk}": str(ON_DISK)}
        found = [functools.reduce(lambda text, name: text.replace(name, paths[name]), paths, word) for word in words]
        return on_a_cpu(found) if cpu else found

    def on_a_cpu(self) -> list[str]:
        """The command, small; several jobs may have the same one."""
        return on_a_cpu(shlex.split(self.command))


ON_DISK = Path(tempfile.gettempdir()) / "wancore-on-disk"
FILES = {"i2v": 30, "t2v": 30, "": 0}  # seconds until the files of a task are written: 36 GB


def has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def has_comfyui() -> bool:
    return (Path(os.environ.get("COMFYUI_PATH", "~/comfy/ComfyUI")).expanduser() / "main.py").is_file()


NEEDS = {  # name -> (whether it is here, what to do)
    "comfyui": (has_comfyui, "no ComfyUI: set COMFYUI_PATH, and COMFYUI_PYTHON to its Python"),
    "cudnn": (lambda: has_module("cudnn"), "nvidia-cudnn-frontend is not installed"),
    "pytest": (lambda: has_module("pytest"), "pytest is not installed"),
}


def missing(job: Job, gpus: int, *, cpu: bool) -> str | None:
    """What a machine with so many GPUs lacks for the job; None: nothing."""
    if not cpu and job.gpus > gpus:
        return f"needs {job.gpus} GPU{'s' * (job.gpus > 1)}"
    needs = [need for need in job.needs if not (cpu and need == "cudnn")]
    return next((advice for need in needs for here, advice in [NEEDS[need]] if not here()), None)


SMALL_SIZE = "64x64x5"
ON_A_CPU = {"--size": SMALL_SIZE, "--runs": "1", "--steps": "4", "--frames": "5"}


def on_a_cpu(words: Sequence[str]) -> list[str]:
    """The same command on the embedded model or on small files, with one size and one run."""
    found: list[str] = []
    for option, word in zip(["", *words], words, strict=False):
        if option == "--size" and SMALL_SIZE in found:
            found.pop()  # a second size
        else:
            found.append("tiny" if word.startswith("random:") else ON_A_CPU.get(option, word))
    if "--runs" not in found and not {"tests", "templates"} & set(found):
        found += ["--runs", "1"]
    if "tests" in found:
        found[found.index("gpu tests")] = "'not gpu' tests/benchmarks/test_setups.py"
    return [*found, "--device", "cpu", *(() if "--size" in found else ("--size", SMALL_SIZE))]


# ----------------------------------------------------------------------------------------------------------- the table

KITCHEN = "native, comfy kitchen attention"
SPARSE, CACHED = "native, Model Sparse Attention", "native, EasyCache"
EXACT, FP8 = (f"native, accelerated, {kind}" for kind in ("auto", "cudnn-fp8"))
OUR_EXACT, OUR_FP8 = (f"ours, {kind}" for kind in ("auto", "cudnn-fp8"))
WORDS = tuple(f"ours, {word}" for word in ("careful", "balanced", "fast"))
HD, SD, SQUARE = "1280x720x81", "832x480x81", "640x640x81"
FAST = "--precision fp8 --attention fast"
FOUR = "--preset 4-step " + " ".join(
    f"--lora {expert}={{models}}/loras/wan2.2_i2v_lightx2v_4steps_lora_v1_{expert}_noise.safetensors"
    for expert in ("high", "low")
)
WHOLE = "whole videos, 720p, 40 guided steps"
CARDS = "smaller cards and less host memory, four steps, whole videos"


def suite(name: str, seconds: int, table: str, words: str, **more: Any) -> Job:
    return Job(name=name, seconds=seconds, table=table, command=f"-m benchmarks {words} --out {{out}}", **more)


def everyday(name: str, seconds: int, size: str, part: str, *sides: str, gpus: int = 1, more: str = "") -> Job:
    """ComfyUI's template from click to file, with the sides named, all steps of all sides."""
    steps = " --steps 20" if part == "off" else ""
    words = f"everyday --setting {part} --size {size} --gpus {gpus}{steps} {repeated('setup', sides)} {more}"
    work = {
        "on": "four steps",
        "fresh": "four steps, new prompt and picture",
        "t2v": "text to video, four steps",
        "off": "20 guided steps",
        "cold": "four steps, first prompt of a server",
    }[part]
    table = f"ComfyUI's template from click to file, {size}, {work}"
    files, needs = ("t2v" if part == "t2v" else "i2v"), ("comfyui", "cudnn")
    return suite(name, seconds, table, f"{words} --scratch {{scratch}}", gpus=gpus, files=files, needs=needs)


def videos(
    name: str, seconds: int, table: str, model: str, *settings: str, gpus: int = 1, runs: int = 2, size: str = HD
) -> Job:
    """Whole videos of the command line. settings: "NAME: words of generate"."""
    words = f"videos --model files:{model} {repeated('setting', settings)} --gpus {gpus} --runs {runs} --size {size}"
    return suite(name, seconds, table, f"{words} --scratch {{scratch}}", gpus=gpus, files=model, needs=("cudnn",))


def small(name: str, seconds: int, *settings: str, size: str = SQUARE) -> Job:
    words = f"small {repeated('setting', settings)} --size {size} --scratch {{disk}}"
    return suite(name, seconds, CARDS, words, needs=("cudnn",))


def template(part: str, seconds: int) -> Job:
    sides = ("native", "accelerated, auto", "accelerated, cudnn-fp8", "ours, bf16", "ours, fp8")
    words = f"templates --setting {part} {repeated('setup', sides)} --layers 40 --size {SD} --scratch {{scratch}}"
    table = "ComfyUI's templates of other models, samplers, 40 blocks"
    return suite(f"template-{part}", seconds, table, words, needs=("comfyui", "cudnn"))


def repeated(option: str, values: Sequence[str]) -> str:
    return " ".join(f"--{option} {shlex.quote(value)}" for value in values)


DOOR = ("native", KITCHEN, EXACT, FP8, OUR_EXACT, OUR_FP8)
JOBS: tuple[Job, ...] = (
    # a. tests
    suite("gpu-tests", 400, "GPU tests", "tests --setting 'gpu tests'", needs=("pytest",)),
    suite("two-gpus-tests", 330, "GPU tests", "tests --setting 'gpu tests'", gpus=2, needs=("pytest",)),
    # b. ComfyUI's own template as it is, with our node, and with our sampler
    everyday("on-640", 500, SQUARE, "on", *DOOR),
    everyday("on-640-wide", 580, SQUARE, "on", *DOOR, more="--wide"),
    everyday("fresh-640", 400, SQUARE, "fresh", "native", KITCHEN, EXACT, OUR_EXACT),
    everyday("on-720", 1320, HD, "on", *DOOR),
    everyday("fresh-720", 910, HD, "fresh", "native", KITCHEN, EXACT),
    # c. with guidance, and what leaves out a part of the work
    everyday("off-640", 400, SQUARE, "off", KITCHEN, OUR_EXACT, OUR_FP8, *WORDS),
    everyday("off-480", 400, SD, "off", KITCHEN, OUR_EXACT, OUR_FP8, *WORDS),
    everyday("off-640-rivals", 520, SQUARE, "off", KITCHEN, SPARSE, CACHED),
    everyday("off-640-native", 500, SQUARE, "off", KITCHEN, EXACT, FP8),
    # d. the first prompt of a server
    everyday("cold-640", 420, SQUARE, "cold", "native", KITCHEN, OUR_FP8),
    # e. other models
    *(template(part, seconds) for part, seconds in (("animate2", 300), ("vace", 230), ("s2v", 420), ("fun", 450))),
    # f. small machines
    small("small", 560, *(f"fp8 {cell}" for cell in ("whole", "12/32", "12/16", "8/32", "24/16"))),
    small("small-more", 560, *(f"fp8 {cell}" for cell in ("whole", "8/16", "16/16", "16/32", "8/64", "24/32"))),
    small("small-gguf", 560, *(f"gguf {cell}" for cell in ("whole", "8/16", "12/16", "8/32", "12/32"))),
    small("small-480", 400, *(f"fp8 {cell}" for cell in ("whole", "12/32", "12/16", "8/32", "24/16")), size=SD),
    # g. two GPUs of one host
    everyday(
        "two-gpus-on", 300, SQUARE, "on",
        KITCHEN, EXACT, OUR_FP8, "ours, cudnn-fp8, 2 GPUs", "native, on all GPUs, 2 GPUs", gpus=2,
    ),
    everyday("two-gpus-t2v", 170, SQUARE, "t2v", KITCHEN, EXACT, "native, on all GPUs, 2 GPUs", gpus=2),
    everyday(
        "two-gpus-off", 500, SQUARE, "off",
        f"{KITCHEN}, 2 GPUs", "ours, cudnn-fp8, 2 GPUs", "ours, fast, 2 GPUs", gpus=2,
    ),
    videos(
        "two-gpus", 500, "two GPUs, 480p, 8 guided steps", "t2v",
        *(f"{mesh}: {FAST} --mesh {mesh} --steps 8 --solver euler" for mesh in ("2x1x1", "1x1x2", "layers2", "time2")),
        gpus=2, runs=1, size=SD,
    ),
    # h. parts of it
    videos(
        "lora-phases", 200, "LoRA strengths by phase, 480p", "i2v",
        f"one strength: {FAST} {FOUR}", f"by phase: {FAST} {FOUR.replace('4-step', 'motion', 1)}", size=SD,
    ),
    suite(
        "attention", 200, "attention kernels",
        f"attention --size {HD} --size {SD}", needs=("cudnn",),
    ),
    suite(
        "forwards", 400, "one forward",
        f"single --model random:t2v-A14B --size {HD} --size {SD} --runs 3 --layers 8 --setup diffusers-compiled"
        " --setup comfyui-compiled --setup '+ flash4' --setup fp8 --setup 'fp8 + cudnn-fp8'", needs=("cudnn",),
    ),
    videos("full-fp8", 1300, WHOLE, "t2v", f"FP8, nothing skipped: {FAST}", runs=1),
    videos("full-exact", 1700, WHOLE, "t2v", "exact: --precision bf16 --attention auto", runs=1),
)  # fmt: skip

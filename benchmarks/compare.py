"""Suite `compare`: denoising steps of this checkout and of another one, measured in turns in one run.

    python -m benchmarks compare --checkout ../other --setup bf16/flash4 --setup fp8/cudnn-fp8 --layers 8 --runs 5

For each setup (PRECISION/ATTENTION, with /compile after it for compiled blocks) two processes load the same random
weights, one from each checkout, and denoise in turns: here, there, here, there. What changes during a run, the card's
temperature or a neighbour's load, then changes both alike. Both models are on the device at the same time: --layers
takes fewer blocks. Steps have one branch and all of them run the high-noise expert. Rows, by name:

SETUP, this       seconds of a step: the median of all steps of `--runs` (5) turns, after a turn that is not counted
SETUP, COMMIT     the same of the other checkout
spread            the slowest step less the fastest
ratio             seconds of the other checkout over ours, from the same run
turns             the median step of each turn, in order
identical         whether both gave the same latents, bit for bit
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import parse_size
from benchmarks.rows import Row, guarded
from wan_core.config import PRECISIONS, OptionError
from wan_core.execution.report import GIB
from wan_core.ops.attention.registry import BACKENDS
from wan_lab.results import commit

HERE = Path(__file__).resolve().parents[1]
PROGRAM = Path(__file__).with_name("compared.py")
PROMPT = "a red circle moving right on a blue background"
THIS = "this"
STEPS = 4  # of a turn; the first is not counted


def compare_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Two rows for each setup and size. Raises OptionError for a folder that is no checkout, or an unknown setup."""
    other = check_checkout(options.checkout)
    default = ("bf16/flash4", "fp8/cudnn-fp8") if device.type == "cuda" else ("fp32/sdpa",)
    setups = {entry: load_arguments(entry, name, device, options.layers) for entry in options.setup or default}
    steps, turns = options.steps or STEPS, options.runs or 5
    if steps < 2:
        raise OptionError(f"steps {steps} given; a turn needs at least 2, since the first step is not counted")
    label = commit(other) or other.name
    checkouts = {THIS: HERE, label: other} if label != THIS else {THIS: HERE, "other": other}
    details |= {"layers": options.layers, "commits": {key: commit(path) for key, path in checkouts.items()}}
    for entry, arguments in setups.items():
        yield from setup_rows(entry, arguments, checkouts, sizes, steps, turns)


def check_checkout(folder: Path | None) -> Path:
    if folder is None:
        raise OptionError("no --checkout given: it is the folder of the checkout to compare this one with")
    if not (folder / "wan_core" / "__init__.py").is_file():
        raise OptionError(f"--checkout {folder} given; there is no wan_core in it")
    return folder.resolve()


def load_arguments(entry: str, name: str, device: torch.device, layers: int | None) -> dict[str, Any]:
    """The arguments of LoadOptions for PRECISION/ATTENTION[/compile]. Raises OptionError."""
    precision, _, rest = entry.partition("/")
    attention, _, compiled = rest.partition("/")
    if precision not in PRECISIONS or attention not in BACKENDS or compiled not in ("", "compile"):
        raise OptionError(
            f"setup {entry!r} given; the suite compare takes PRECISION/ATTENTION or PRECISION/ATTENTION/compile. "
            f"Precisions: {', '.join(PRECISIONS)}. Attention: {', '.join(BACKENDS)}"
        )
    if layers is not None and not name.startswith("random:"):
        raise OptionError(f"layers {layers} given with model {name!r}; only random:TASK can have fewer blocks")
    return {
        "model": name if layers is None else f"{name}:{layers}",
        "device": str(device),
        "precision": precision,
        "attention": attention,
        "compile": "blocks" if compiled else "off",
        "residency": "resident",
    }


def setup_rows(
    entry: str, arguments: dict[str, Any], checkouts: dict[str, Path], sizes: list[str], steps: int, turns: int
) -> Iterator[Row]:
    """Rows of one setup: all its processes live until its last size is measured."""
    with ExitStack() as stack:
        sides = {label: stack.enter_context(Side(folder, arguments)) for label, folder in checkouts.items()}
        for size in sizes:
            width, height, frames = parse_size(size)
            request = {
                "prompt": PROMPT, "width": width, "height": height, "frames": frames, "steps": steps,
                "boundary": 0.0, "guidance_high": 1.0, "guidance_low": 1.0,
            }  # fmt: skip
            both = guarded(entry, size, None, lambda r=request: {"found": in_turns(sides, r, turns)})
            if "failed" in both:
                yield both
                continue
            found: dict[str, Row] = both["found"]
            other = next(label for label in checkouts if label != THIS)
            for label, row in found.items():
                row["ratio"] = round(found[other]["seconds"] / row["seconds"], 4)
                yield {"name": f"{entry}, {label}", "size": size, **row, "ratio_to": f"{entry}, {other}"}


def in_turns(sides: dict[str, Side], request: dict[str, Any], turns: int) -> dict[str, Row]:
    """The numbers of each side. The first turn of each loads kernels and compiles, and is not counted."""
    answers: dict[str, list[dict[str, Any]]] = {label: [] for label in sides}
    for _ in range(turns + 1):
        for label, side in sides.items():
            answers[label].append(side.ask(request))
    identical = len({answer["digest"] for each in answers.values() for answer in each}) == 1
    return {label: numbers(each[1:]) | {"identical": identical} for label, each in answers.items()}


def numbers(answers: list[dict[str, Any]]) -> Row:
    seconds = [second for answer in answers for second in answer["seconds"]]
    row: Row = {
        "seconds": round(statistics.median(seconds), 5),
        "spread": round(max(seconds) - min(seconds), 5),
        "turns": [round(statistics.median(answer["seconds"]), 5) for answer in answers],
    }
    if peak := max(answer["peak"] for answer in answers):
        row["peak_gib"] = round(peak / GIB, 3)
    return row


class Side:
    """A process of one checkout that holds a loaded model. Use as a context: it ends with it."""

    def __init__(self, folder: Path, arguments: dict[str, Any]) -> None:
        self.folder, self.arguments, self.ready = folder, arguments, False

    def __enter__(self) -> Side:
        program = PROGRAM.read_text(encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(self.arguments)],
            cwd=self.folder,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, (str(self.folder), os.environ.get("PYTHONPATH")))),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have it denoise once. Raises RuntimeError with what failed there."""
        if not self.ready:
            self._answer()
            self.ready = True
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process in {self.folder} ended with code {self.process.wait()}: see its output")
        answer = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(f"in {self.folder}: {answer['failed']}")
        return answer

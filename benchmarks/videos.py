"""Suite `videos`: whole videos of the command line, from the start of the process to the file, and kept.

    python -m benchmarks videos --model files:t2v --scratch /dev/shm/wc --setting "fast: --precision fp8 --speed fast"

A setting is a name and words of `generate`. Each is one process with a list of videos (`--prompts`): one prompt, and
`--runs` (3) seeds after the first, none with 0. With `--gpus N` they share one video where the words name a mesh of all
N (`--mesh 2x1x2`); without one every GPU makes videos of its own. `--model files:TASK` (i2v, t2v) writes files as
ComfyUI's template has them into --scratch, random values in FP8, and uses them again; {models} in a setting is their
folder. On a CPU it is the embedded model, with random LoRAs of its size.

NAME: cold     seconds from the start of the process to the first file, with loading and compiling
NAME: kept     seconds from one file to the next, the median: models are loaded, and the prompt is encoded
NAME: list     with several makers: seconds for each video after the first of each, all GPUs together

load, text, image, denoise, decode: seconds of that video's phases; the file is written while frames are decoded.
phases, notes: of that video's report
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.cases import parse_size
from benchmarks.comfy_files import EXPERTS, IMAGES, lora_file, write_files, write_images, write_lora
from benchmarks.rows import Row, guarded
from wan_core.checkpoint import load_dit
from wan_core.config import OptionError
from wan_core.parallel.mesh import Mesh
from wan_core.pipeline.sources import TINY

FILES = "files:"
PROMPT = "a red circle moving right on a blue background"
PHASES = ("load", "text", "image", "denoise", "decode")


def videos_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Raises OptionError for a setting without a name, before any work."""
    settings = [entry.partition(":") for entry in options.setting or ()]
    if not settings or not all(colon and words.strip() for _, colon, words in settings):
        raise OptionError('give settings as "NAME: words of generate", for example --setting "fast: --speed fast"')
    gpus, runs = options.gpus or 1, 3 if options.runs is None else options.runs
    details |= {"gpus": gpus}
    with TemporaryDirectory(prefix="wancore-videos-", dir=options.scratch) as folder:
        scratch = Path(options.scratch or folder)
        models = scratch / ("tiny" if device.type == "cpu" else "models")
        model = model_words(name, scratch, models, device)
        for size in sizes:
            for label, _, words in settings:
                chosen = shlex.split(words.replace("{models}", str(models)))
                making = Making(Path(folder), model, device, gpus, chosen, size, runs)
                found = guarded(label, size, None, lambda m=making: {"rows": m.rows()})
                for row in found.get("rows", [found]):
                    yield row | {"name": f"{label}: {row['name']}" if "rows" in found else label}


def model_words(name: str, scratch: Path, models: Path, device: torch.device) -> list[str]:
    """The options that name the model, its files written into `models`."""
    task = name.removeprefix(FILES)
    image: list[str] = []
    if "i2v" in task:
        write_images(scratch)
        image = ["--image", str(scratch / "input" / IMAGES[0])]
    if not name.startswith(FILES):
        return ["--model", name, *image]
    if task not in ("i2v", "t2v"):
        raise OptionError(f"model {name!r} given; files are written for files:i2v and files:t2v")
    if device.type == "cpu":
        config = load_dit(TINY / f"{task}_high.safetensors", device=device).config
        for expert in EXPERTS:
            path = models / "loras" / lora_file(task, expert)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_lora(path, config, device)
        return ["--model", "tiny", *image]
    write_files(models, device, task)
    return ["--model", str(models), "--task", f"{task}-A14B", *image]


@dataclass
class Making:
    """One process that makes a list of videos. model, words: of `generate`. runs: videos of each maker after its first.
    prefix: words before the command. counter: of bytes read from a disk."""

    folder: Path
    model: list[str]
    device: torch.device
    gpus: int
    words: list[str]
    size: str
    runs: int
    prefix: Sequence[str] = ()
    counter: Callable[[], int] = lambda: 0

    def __post_init__(self) -> None:
        words = self.words
        mesh = Mesh.parse(words[words.index("--mesh") + 1]) if "--mesh" in words else None
        self.makers = self.gpus // (1 if mesh is None else mesh.size)
        self.count = max(self.makers, 1) * (self.runs + 1)

    @property
    def command(self) -> list[str]:
        width, height, frames = parse_size(self.size)
        several = ",".join(["cpu"] * self.gpus) if self.device.type == "cpu" else str(self.gpus)
        where = ["--device", str(self.device)] if self.gpus == 1 else ["--gpus", several]
        command = [*self.prefix, sys.executable, "-m", "wan_core", "generate", *self.model, *where]
        return [*command, "--size", f"{width}x{height}", "--frames", str(frames), *self.words]

    def rows(self) -> list[Row]:
        """Raises RuntimeError with the end of what the process said."""
        if not self.makers:
            raise RuntimeError("the mesh has more ranks than there are GPUs")
        with TemporaryDirectory(dir=self.folder) as out:
            listed = Path(out, "list.jsonl")
            lines = [json.dumps({"prompt": PROMPT, "seed": seed}) for seed in range(1, self.count + 1)]
            listed.write_text("\n".join(lines) + "\n", encoding="utf-8")
            begin, read = time.time(), [self.counter()]
            with Path(out, "printed").open("w+") as printed:
                process = subprocess.Popen(
                    [*self.command, "--prompts", str(listed), "--out", str(Path(out, "clip.mp4"))],
                    cwd=Path(__file__).parents[1], stdout=printed, stderr=subprocess.STDOUT,
                )  # fmt: skip
                while process.poll() is None:
                    time.sleep(0.05)
                    read += [self.counter()] * (len(list(Path(out).glob("*.report.json"))) - len(read) + 1)
                printed.seek(0)
                said = printed.read()
            reports = sorted(Path(out).glob("*.report.json"), key=lambda path: path.stat().st_mtime)
            if process.returncode or len(reports) < self.count:
                last = " | ".join(said.strip().splitlines()[-4:])
                raise RuntimeError(f"{len(reports)} of {self.count} videos, exit code {process.returncode}: {last}")
            read += [self.counter()] * (len(reports) - len(read) + 1)
            ends = [path.stat().st_mtime - begin for path in reports]
            found = [json.loads(path.read_text(encoding="utf-8")) for path in reports]
            for report, before, after in zip(found, read, read[1:], strict=False):
                report["disk_gb"] = round((after - before) / 1e9, 2)
            return self.timed(ends, found)

    def timed(self, ends: list[float], reports: list[Row]) -> list[Row]:
        """Rows of videos that were finished so many seconds after the start of the process."""
        cold = self.row("cold", ends[0], reports[0])
        if self.makers > 1:
            each = (ends[-1] - ends[self.makers - 1]) / (self.count - self.makers)
            return [cold, self.row("list", each, reports[-1]) | {"videos": self.count, "gpus": self.makers}]
        took = [after - before for before, after in pairwise(ends)]
        if not took:
            return [cold]
        middle = sorted(range(len(took)), key=lambda n: took[n])[(len(took) - 1) // 2]
        kept = self.row("kept", statistics.median(took), reports[middle + 1])
        times = [round(each, 3) for each in took]
        return [cold, kept | {"spread": round(max(took) - min(took), 3), "runs": len(took), "times": times}]

    def row(self, name: str, seconds: float, report: Row) -> Row:
        phases: dict[str, float] = {}
        for phase, numbers in report["phases"].items():
            short = phase.split()[0]
            phases[short] = round(phases.get(short, 0.0) + numbers["seconds"], 3)
        row: Row = {"name": name, "size": self.size, "seconds": round(seconds, 3)}
        row |= {key: value for key, value in phases.items() if key in PHASES and (key != "load" or name == "cold")}
        row |= {"peak_gib": report["peak_device_gib"]} if report["peak_device_gib"] else {}
        row |= {"disk_gb": report["disk_gb"]} if report.get("disk_gb") else {}
        return row | {"notes": report["notes"], "phases": {n: p["seconds"] for n, p in report["phases"].items()}}

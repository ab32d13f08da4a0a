"""Pipelines that take turns, for suite `streaming`: text to video and image to video, two sizes, many generations.

Random weights with `--layers` blocks (4 if not said) in FP8; the embedded models on a CPU. Each pipeline stays loaded,
as a program that serves both keeps them. One row for each residency, "turns, resident" and "turns, swap":

seconds             median from the call of `generate` to the launch of its first forward, the other pipeline having
                    run before: the change of the task, and encoding text and image
switch_ms           median from the end of the last forward of the high-noise expert to the begin of the low-noise one's
                    first: the change of experts in it
device_mib          allocated on the device after each generation; on a CPU, the bytes of all live tensors
host_mib            resident size of the process after each
device_growth_mib   the most of device_mib after every pipeline made every size, less what it was when each just had
host_growth_mib     the same of host_mib
compilations        graphs compiled after that
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import parse_size
from benchmarks.measure import compile_counts, make_room, settle
from benchmarks.process import resident_bytes
from benchmarks.rows import Row, guarded
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.execution.memory.residency import Policy
from wan_core.pipeline.pipeline import Pipeline

MIB = 1 << 20
GENERATIONS = 30
TASKS = ("t2v", "i2v")
PROMPT = "a red circle moving right on a blue background, number {}"


def turns_rows(
    name: str, sizes: list[str], device: torch.device, layers: int | None, generations: int = GENERATIONS
) -> Iterator[Row]:
    """One row for each residency. Raises OptionError for a model that is of one task."""
    if name not in ("tiny", "random:t2v-A14B"):
        raise OptionError(f"model {name!r} given; pipelines take turns with random:t2v-A14B and tiny")
    policies: tuple[Policy, ...] = ("resident", "swap") if device.type == "cuda" else ("resident",)
    for policy in policies:
        label = "x".join(map(str, parse_size(sizes[-1])))
        make = partial(turns_row, name, sizes, device, layers, policy, generations)
        yield guarded(f"turns, {policy}", label, None, make)
        make_room(device)


def turns_row(
    name: str, sizes: list[str], device: torch.device, layers: int | None, policy: Policy, generations: int
) -> Row:
    return Turns(name, sizes, device, layers, policy).row(generations)


class Turns:
    """Two pipelines, and the requests that they are given in turn."""

    def __init__(
        self,
        name: str,
        sizes: list[str],
        device: torch.device,
        layers: int | None,
        policy: Policy,
    ) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        width, height, _ = parse_size(sizes[0])
        frames = 9
        self.sizes = ((width, height, frames), (height // 32 * 32, width // 32 * 32, frames + 4))
        models = {task: f"random:{task}-A14B:{layers or 4}" if name != "tiny" else "tiny" for task in TASKS}
        self.pipes: dict[str, Pipeline] = {}
        self.marks: dict[str, Any] = {}
        for task, model in models.items():
            options = LoadOptions(
                model=model,
                task=f"{task}-tiny" if name == "tiny" else None,
                device=str(device),
                precision="fp8" if self.cuda else "checkpoint",
                compile="blocks" if self.cuda else "off",
                residency=policy if self.cuda else "auto",
            )
            self.pipes[task] = pipe = Pipeline.load(options)
            self._watch(pipe)

    def _watch(self, pipe: Pipeline) -> None:
        """Mark when forwards begin and end; `expert` brings a model's name back from its place."""
        for name in ("high", "low"):
            model = pipe.models.residency.models[name]
            model.register_forward_pre_hook(lambda *_, n=name: self._begins(n))
            model.register_forward_hook(lambda *_, n=name: self._ends(n))

    def _begins(self, name: str) -> None:
        self.marks.setdefault("launched", time.perf_counter())
        if name == "low":
            self.marks.setdefault("low begins", self._mark())

    def _ends(self, name: str) -> None:
        if name == "high":
            self.marks["high ends"] = self._mark()

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def row(self, generations: int) -> Row:
        """`generations` videos, the tasks in turn, each task's sizes in turn."""
        first, switches, device_bytes, host, graphs = [], [], [], [], []
        with tempfile.TemporaryDirectory(prefix="wancore-turns-") as folder:
            image = Path(folder) / "first.png"
            draw(image)
            for i in range(generations):
                task, size = TASKS[i % 2], self.sizes[i // 2 % 2]
                seconds, switch = self._generate(task, size, i, image)
                first.append(seconds)
                switches.append(switch)
                device_bytes.append(self._held())
                host.append(resident_bytes())
                graphs.append(compile_counts()[0])
        known = len(TASKS) * len(self.sizes)  # generations until each has made each
        return {
            "seconds": round(statistics.median(first[known:]), 4),
            "spread": round(max(first[known:]) - min(first[known:]), 4),
            "switch_ms": round(statistics.median(switches[known:]) * 1000, 2),
            "generations": generations,
            "device_growth_mib": round((max(device_bytes[known:]) - max(device_bytes[:known])) / MIB, 3),
            "host_growth_mib": round((max(host[known:]) - host[known - 1]) / MIB, 1),
            "device_mib": [round(held / MIB, 2) for held in device_bytes],
            "host_mib": [round(held / MIB) for held in host],
            "compilations": graphs[-1] - graphs[known - 1],
        }

    def _generate(self, task: str, size: tuple[int, int, int], number: int, image: Path) -> tuple[float, float]:
        """(seconds to the first launch, seconds of the change of experts) of one video of two steps."""
        width, height, frames = size
        request = Request(
            prompt=PROMPT.format(number),
            image=str(image) if task == "i2v" else None,
            width=width,
            height=height,
            frames=frames,
            steps=2,
            boundary=0.9,
            shift=1.0,  # one step for each expert
            seed=number,
        )
        self.marks.clear()
        settle(self.device)
        begin = time.perf_counter()
        self.pipes[task].generate(request)
        settle(self.device)
        ends, begins = self.marks["high ends"], self.marks["low begins"]
        switch = ends.elapsed_time(begins) / 1000 if self.cuda else begins - ends
        return self.marks["launched"] - begin, switch

    def _held(self) -> int:
        self.marks.clear()
        return torch.cuda.memory_allocated(self.device) if self.cuda else live_bytes()


def draw(path: Path) -> None:
    """A picture to start a video from."""
    from PIL import Image

    Image.new("RGB", (96, 96), (20, 40, 200)).save(path)


def live_bytes() -> int:
    """Of all tensors on the CPU that Python refers to, each memory once."""
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and found.device.type == "cpu" and found.layout == torch.strided:
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())

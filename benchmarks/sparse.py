"""Suite `sparse`: whole videos with sparse attention.

SETTING           a whole video, by phase, as `quality --setting` writes it: magcache:balanced+sparse:balanced.
                  With a bound (sparse:bound:0.06) also the share of the blocks and the errors of each step
SETTING@STEPS     the same in so many steps without guidance, as step-distilled weights are run
native            one forward of ComfyUI's own transformer, compiled, and what a run of the task's steps with guidance
                  takes at that, our encoding and decoding included

Weights are random: times mean something, videos do not.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.cases import make_case, parse_size, plain_model
from benchmarks.measure import make_room, measure
from benchmarks.options import SUITES
from benchmarks.peers import PEERS
from benchmarks.rows import Row, guarded
from benchmarks.setups import Setup, find_setup
from wan_core.config import OptionError, Request, SkipOptions
from wan_core.execution.report import GIB
from wan_core.models.wan.families import find_task
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.cache.arguments import parse_setting

PROMPT = "a red circle moving right on a blue background"
KEEPS = (0.5, 0.25, 0.125)
NATIVE = "comfyui-compiled"


def sparse_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Raises OptionError for an entry that is not known, before any work."""
    entries = options.setting or SUITES["sparse"].settings
    for entry in entries:
        if entry != "native":
            parse_setting(entry.partition("@")[0])
            if not (entry.partition("@")[2] or "1").isdecimal():
                raise OptionError(f"setting {entry!r} given; after @ comes a number of steps")
    chosen = options.setup or (["fp8 + cudnn-fp8"] if device.type == "cuda" else ["plain torch"])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
    if device.type == "cpu":
        dtype = torch.float32
    for setup in map(find_setup, chosen):
        if reason := setup.why_not(device, dtype):
            raise OptionError(reason)
    trial = Trial(name, device, dtype, options.runs or 3, options.layers)
    for size in sizes:
        for entry in entries:
            make_room(device)
            if entry == "native":
                yield guarded("native", size, PEERS[NATIVE].why_not(), lambda s=size: trial.native(s))
            else:
                for setup in map(find_setup, chosen):
                    yield from trial.videos(entry, setup, size, options.steps)


class Trial:
    """What the rows of one run share."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, runs: int, layers: int | None) -> None:
        self.name, self.device, self.dtype, self.runs, self.layers = name, device, dtype, runs, layers
        self.native_forward: dict[str, float] = {}
        self.pipes: dict[str, Pipeline] = {}
        self.warm: set[tuple[object, ...]] = set()
        self.folder = TemporaryDirectory(prefix="wancore-sparse-")

    def native(self, size: str) -> Row:
        """A forward of the peer on random weights, all layers."""
        model, stride = plain_model(self.name, self.device, self.dtype, self.layers, None)
        case = make_case(model, size, stride)
        _, run = PEERS[NATIVE].ready(model)
        measured = measure(lambda: lambda: run(case.x, case.timestep, case.contexts[0]), self.device, self.runs)
        self.native_forward[size] = measured.median
        return {**measured.numbers(), "tokens": case.tokens}

    def picture(self, width: int, height: int) -> Path:
        """A first frame."""
        from PIL import Image

        path = Path(self.folder.name) / f"{width}x{height}.png"
        Image.new("RGB", (width, height), (20, 40, 200)).save(path)
        return path

    def videos(self, entry: str, setup: Setup, size: str, steps: int | None) -> Iterator[Row]:
        """A row for each phase, the total, and the native time computed from the forward of `native` in this run."""
        setting, _, few = entry.partition("@")
        width, height, frames = parse_size(size)
        request = Request(
            prompt=PROMPT,
            width=width,
            height=height,
            frames=frames,
            steps=int(few) if few else steps,
            skip=parse_setting(setting),
            guidance_high=1.0 if few else None,
            guidance_low=1.0 if few else None,
            shift=5.0 if few else None,
        )
        if setup.name not in self.pipes:
            self.pipes.clear()
            make_room(self.device)
            load = setup.load_options(self.name, self.device)
            self.pipes[setup.name] = Pipeline.load(load)
            self.warm.clear()
        pipe = self.pipes[setup.name]
        if pipe.models.task.image == "channels":  # without one it makes no video
            request = replace(request, image=str(self.picture(width, height)))
        # What is compiled and tuned on first use is no part of a video: two steps, one of each expert, come before.
        sparse = request.skip.sparse if request.skip else None
        ways = sparse and (sparse if sparse.bound else replace(sparse, sparsity=0.875, dense_steps=0.0))
        kind = size, ways
        if kind not in self.warm:
            skip = SkipOptions(sparse=ways) if ways else None
            few_steps = 4 if ways and ways.bound else 2  # a bounded run begins dense, and then with half of the blocks
            pipe.generate(Request(**{**vars(request), "steps": few_steps, "boundary": 0.9, "skip": skip}))
            self.warm.add(kind)
        result = pipe.generate(request)
        found = result.report.as_dict()
        name = f"{entry}, {setup.name}"
        for phase, numbers in found["phases"].items():
            yield {"name": f"{name}: {phase}", "size": size, **numbers}
        for step in result.report.attention:
            yield {"name": f"{name}: {step['expert']} step {step['step']}", "size": size, **step_numbers(step)}
        total = sum(p.seconds for key, p in result.report.phases.items() if key != "load")
        row: Row = {"name": f"{name}: total", "size": size, "seconds": round(total, 3)}
        row["peak_gib"] = round(max((p.peak for p in result.report.phases.values()), default=0) / GIB, 3)
        row |= {"forwards": result.plan.forwards, "notes": result.report.notes}
        row |= {"attention": result.report.attention} if result.report.attention else {}
        if size in self.native_forward and not few:
            default = find_task(result.plan.task)
            ours = sum(p.seconds for key, p in result.report.phases.items() if key in ("text", "decode"))
            native = 2 * (steps or default.steps) * self.native_forward[size] + ours
            row |= {"native_seconds": round(native, 2), "ratio": round(native / total, 3), "ratio_to": NATIVE}
        yield row


def step_numbers(step: Mapping[str, Any]) -> Row:
    """The mean share of the blocks that a step read, its error (the mean over the layers), and the largest."""
    errors = [error or 0.0 for error in step["errors"]]
    shares = step["shares"]
    mean = sum(errors) / len(errors)
    return {"share": round(sum(shares) / len(shares), 4), "error": round(mean, 5), "largest_error": max(errors)}

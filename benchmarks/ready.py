"""A pipeline from its first prompt on, for suite `startup`: how long until the first forward of a video is launched.

Random weights at full size (`--layers` for fewer blocks) in FP8, everything resident; on a CPU the embedded model as it
is. Rows, by name:

first prompt     right after loading for it
second prompt    another one at the same size
changed size     another one at half of the width, the height and the frames
back again       at the size of before

seconds          from the call of `generate` to the launch of its first forward: checks, text encoding and preparing
                 the prompt in it
compilations     graphs that torch compiled in it and in the first step
load_seconds     of loading (in the first row)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.cases import parse_size
from benchmarks.measure import compile_counts, settle
from benchmarks.rows import Row, guarded
from wan_core.config import LoadOptions, Request
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.watch import Watch

PROMPTS = (
    "a red circle moving right on a blue background",
    "a green square moving left on a white background",
    "a blue circle moving up on a black background",
    "a white square moving down on a red background",
)
NAMES = ("first prompt", "second prompt", "changed size", "back again")


class FirstStepDone(Exception):
    """Ends a generation after its first step."""


def ready_rows(name: str, sizes: list[str], device: torch.device, layers: int | None) -> Iterator[Row]:
    cuda, random = device.type == "cuda", name.startswith("random:")
    options = LoadOptions(
        model=f"{name}:{layers}" if random and layers else name,
        device=str(device),
        precision="fp8" if cuda else "checkpoint",
        residency="resident" if cuda else "auto",
    )
    width, height, frames = parse_size(sizes[-1])
    request = Request(prompt=PROMPTS[0], width=width, height=height, frames=frames, steps=2)
    smaller = halved(request)
    begin = time.perf_counter()
    pipe = Pipeline.load(options, request=request)
    settle(device)
    loaded = round(time.perf_counter() - begin, 3)
    for row_name, prompt, like in zip(NAMES, PROMPTS, (request, request, smaller, request), strict=True):
        asked = replace(like, prompt=prompt)
        size = f"{asked.width}x{asked.height}x{asked.frames}"
        row = guarded(row_name, size, None, lambda r=asked: until_first_forward(pipe, r))
        yield row | ({"load_seconds": loaded, "notes": pipe.loaded.notes} if row_name == NAMES[0] else {})


def halved(request: Request) -> Request:
    """About half of the width, the height and the frames, as every model takes them."""
    assert request.width and request.height and request.frames
    return replace(
        request,
        width=max(32, request.width // 64 * 32),
        height=max(32, request.height // 64 * 32),
        frames=max(1, (request.frames - 1) // 8 * 4 + 1),
    )


def until_first_forward(pipe: Pipeline, request: Request) -> Row:
    """Generate up to the first step: seconds until its first forward is launched."""
    launched: list[float] = []
    model = pipe.models.residency.models["high"]
    hook = model.register_forward_pre_hook(lambda *_: launched.append(time.perf_counter()))
    graphs = compile_counts()[0]

    def stop(*_: Any) -> None:
        raise FirstStepDone

    settle(pipe.models.device)
    begin = time.perf_counter()
    try:
        pipe.generate(request, Watch(step=stop))
    except FirstStepDone:
        settle(pipe.models.device)
    finally:
        hook.remove()
    return {
        "seconds": round(launched[0] - begin, 4),
        "compilations": compile_counts()[0] - graphs,
    }

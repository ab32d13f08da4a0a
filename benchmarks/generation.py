"""Suite `generate`: one whole video, a row for each phase."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.cases import parse_size
from benchmarks.rows import Row
from wan_core.config import LoadOptions, Request
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.cache.arguments import skip_options

PROMPT = "a red circle moving right on a blue background"


def generation_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    for size in sizes:
        width, height, frames = parse_size(size)
        skip, steps = skip_options(options), options.steps
        request = Request(prompt=PROMPT, width=width, height=height, frames=frames, steps=steps, skip=skip)
        load = LoadOptions(model=name, device=str(device), precision=options.precision)
        report = Pipeline.load(load, request=request).generate(request).report
        details |= {"settings": report.settings, "notes": report.notes}
        found = report.as_dict()
        for phase, numbers in found["phases"].items():
            yield {"name": phase, "size": size, **numbers}
        yield {"name": "total", "size": size, "seconds": found["total_seconds"], "peak_gib": found["peak_device_gib"]}

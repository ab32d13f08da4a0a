"""Run what was asked for, print it as a table, write it as JSON."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from wan_core.bench.cases import Case, bench_model, make_case, parse_size
from wan_core.bench.options import SUITES
from wan_core.bench.results import envelope, table, write_result
from wan_core.bench.settings import check_setting, make_forward
from wan_core.cache.arguments import skip_options
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.models import choose_device
from wan_core.pipeline import Pipeline
from wan_core.report import GIB


def run_bench(options: argparse.Namespace) -> int:
    device = choose_device(options.device)
    check_options(options)
    measure = measure_generation if options.suite == "generate" else measure_forwards
    name = options.model or ("random:t2v-A14B" if device.type == "cuda" else "tiny")
    rows, details = measure(name, device, options)
    result = envelope(options.suite or "bench", device, rows) | {"model": name} | details
    print(table(rows))
    path = write_result(result, options.out, device)
    if path is not None:
        print(path)
    return 0


def check_options(options: argparse.Namespace) -> None:
    """Raise OptionError for what would fail after the model was made."""
    for size in options.size or ():
        parse_size(size)
    for setting in options.setting or ():
        check_setting(setting)
    if options.runs < 1 or (options.layers is not None and options.layers < 1):
        raise OptionError(f"runs {options.runs} and layers {options.layers} given; both must be at least 1")
    if options.suite == "generate" and (options.layers is not None or options.setting):
        raise OptionError("the suite generate makes whole videos: leave out --layers and --setting")
    if options.suite != "generate" and (options.steps is not None or skip_options(options) is not None):
        raise OptionError("--steps and what leaves forwards out belong to the suite generate: a forward has no steps")


Rows = list[dict[str, Any]]


def measure_forwards(name: str, device: torch.device, options: argparse.Namespace) -> tuple[Rows, dict[str, Any]]:
    """Forwards of one transformer, at every size in every setting."""
    sizes, settings, reference = SUITES[options.suite] if options.suite else ((), (), "")
    sizes = options.size or sizes or (("832x480x81",) if device.type == "cuda" else ("96x96x17",))
    settings = options.setting or settings or ("forward", "sequential", "batched")
    first = reference if reference in settings else settings[0]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
    model, stride = bench_model(name, device, dtype, options.layers)
    rows: Rows = []
    with torch.no_grad():
        cases = [make_case(model, size, stride) for size in sizes]  # all sizes are checked before the first is run
        for case in cases:
            rows += measure_case(case, [first, *(s for s in settings if s != first)], options.runs)
    return rows, {"layers": model.config.num_layers, "dtype": options.precision}


def measure_generation(name: str, device: torch.device, options: argparse.Namespace) -> tuple[Rows, dict[str, Any]]:
    """One whole video, a row for each phase."""
    rows: Rows = []
    for size in options.size or (SUITES["generate"][0] if device.type == "cuda" else ("96x96x17",)):
        width, height, frames = parse_size(size)
        request = Request(
            prompt="a red circle moving right on a blue background",
            width=width,
            height=height,
            frames=frames,
            steps=options.steps,
            skip=skip_options(options),
        )
        load = LoadOptions(model=name, device=str(device), precision=options.precision)
        report = Pipeline.load(load, request=request).generate(request).report
        found = report.as_dict()
        for phase, numbers in found["phases"].items():
            rows.append({"name": phase, "size": size, **numbers})
        rows.append(
            {"name": "total", "size": size, "seconds": found["total_seconds"], "peak_gib": found["peak_device_gib"]}
        )
    return rows, {"settings": report.settings, "notes": report.notes}


def measure_case(case: Case, settings: list[str], runs: int) -> Rows:
    """A row for each setting; ratios and errors refer to the first."""
    rows, reference = [], None
    for setting in settings:
        forward = make_forward(setting, case)
        seconds, peak, output = timed(forward, case.x.device, runs)
        row = {
            "name": setting,
            "size": case.size,
            "tokens": case.tokens,
            "seconds": round(statistics.median(seconds), 5),
            "spread": round(max(seconds) - min(seconds), 5),
            "peak_gib": round(peak, 3),
        }
        if reference is None:
            reference = (row, output)
        row["ratio"] = round(reference[0]["seconds"] / row["seconds"], 4)
        row["ratio_to"] = reference[0]["name"]
        if output.shape == reference[1].shape:
            row["error"] = float(f"{float((output - reference[1]).norm() / reference[1].norm()):.3g}")
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def timed(
    forward: Callable[[], torch.Tensor], device: torch.device, runs: int
) -> tuple[list[float], float, torch.Tensor]:
    """Seconds of `runs` calls after a warm-up, the peak of device memory in GiB (weights included), and the output."""
    cuda = device.type == "cuda"
    forward()
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds, output = [], None
    for _ in range(runs):
        output = None
        begin = time.perf_counter()
        output = forward()
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    assert output is not None
    return seconds, torch.cuda.max_memory_allocated(device) / GIB if cuda else 0.0, output.float()

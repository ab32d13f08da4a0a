"""One cold process, timed by phase: `python -m benchmarks.cold DEVICE SIZE HIGH LOW` prints JSON.

It imports, loads both experts in FP8 where the device multiplies it, by the same functions as `Pipeline.load`, makes
the first forward of the high-noise expert at SIZE, and a second one, which is what a warm forward takes.

--compile: as the option of that name. --profile FILE: what the main thread did after the imports goes there, by
cProfile, which slows it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any


def main() -> None:
    begin = float(os.environ.get("WANCORE_BEGIN", time.time()))
    phases: dict[str, float] = {}

    def lap(name: str) -> None:
        nonlocal begin
        now = time.time()
        phases[name] = round(now - begin, 3)
        begin = now

    options = arguments()
    lap("start Python")
    import torch

    lap("import torch")
    importlib.import_module("wan_core.pipeline.builder")  # and with it nearly all of the package

    lap("import wan_core")
    if options.device.startswith("cuda"):
        torch.zeros(1, device=options.device)
    lap("CUDA context")
    with profiled(options.profile) if options.profile else nullcontext():
        found = run(options, lap)
    print(json.dumps({"phases": phases, **found}))


def run(options: argparse.Namespace, lap: Callable[[str], None]) -> dict[str, Any]:
    """Load, and make the first forwards. What comes back is for `startup.cold`."""
    import torch

    from benchmarks.cases import parse_size
    from benchmarks.measure import compile_counts, settle
    from wan_core.config import Request
    from wan_core.config.compile_cache import set_compile_caches
    from wan_core.execution.optimize import check_compile, optimize
    from wan_core.ops.attention.registry import resolve_attention
    from wan_core.ops.quant.schemes import SCHEMES
    from wan_core.pipeline.loading import load_parts
    from wan_core.pipeline.resolved_request import make_job
    from wan_core.pipeline.settings import choose_device, find_quantization
    from wan_core.pipeline.sources import find_experts
    from wan_core.pipeline.warmup import forward_once

    device = choose_device(options.device)
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    fp8 = find_quantization("fp8", device) if cuda and SCHEMES["fp8"].why_not(device) is None else None
    experts = find_experts(options.high, options.low)
    assert experts.low is not None
    width, height, frames = parse_size(options.size)
    request = Request(prompt="", width=width, height=height, frames=frames, guidance_mode="sequential")
    job = make_job(request, experts.task, experts.dit, experts.vae)
    check_compile(options.compile, device)
    lap("headers, Triton")
    attend = resolve_attention("auto", device, dtype, experts.dit.head_dim)[1]
    lap("attention's library")
    if options.compile != "off":
        set_compile_caches()
    parts = {"high": experts.high, "low": experts.low}
    read: dict[str, float] = {}
    started: list[float] = []

    def load(name: str) -> torch.nn.Module:
        started.append(time.time())
        model = parts[name].load(device, dtype, fp8)
        settle(device)
        read[name] = round(time.time() - started[0], 3)
        return model

    with torch.no_grad():
        models = load_parts(list(parts), load, device, in_order=False)
        settle(device)
        lap("load both experts")
        for model in models.values():
            optimize(model, attend=attend, compile=options.compile, device=device, graphs=False)  # type: ignore
        graphs, _ = compile_counts()
        forward_once(models["high"], job, "high", device)  # type: ignore
        settle(device)
        lap("first forward")
        left = {"graphs": compile_counts()[0] - graphs}
        start = time.time()
        forward_once(models["high"], job, "high", device)  # type: ignore
        settle(device)
        warm = round(time.time() - start, 3)
    return {
        "warm_forward": warm,
        "read": max(read.values()),
        "first_forward": left,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("device", "size", "high", "low"):
        parser.add_argument(name)
    parser.add_argument("--compile", choices=("off", "blocks"), default="blocks")
    parser.add_argument("--profile")
    return parser.parse_args()


@contextmanager
def profiled(path: str) -> Iterator[None]:
    """What this thread does inside, to a file: the 60 calls that took longest, with what they called."""
    import cProfile
    import pstats

    profile = cProfile.Profile()
    with profile:
        yield
    with open(path, "w") as file:
        pstats.Stats(profile, stream=file).sort_stats("cumulative").print_stats(60)


if __name__ == "__main__":
    main()

"""One cold process, timed by phase: `python -m benchmarks.cold DEVICE SIZE HIGH LOW` prints JSON.

It imports, loads both experts in FP8 where the device multiplies it and prepares the first step, by the same
functions as `Pipeline.load`, makes the first forward of the high-noise expert at SIZE, and a second one, which is
what a warm forward takes.

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
    from wan_core.execution.compile_cache import Artifacts
    from wan_core.execution.optimize import check_compile, compilations, compiled_anew, optimize
    from wan_core.ops.attention.registry import resolve_attention
    from wan_core.ops.quant.schemes import SCHEMES
    from wan_core.pipeline.builder import choose_device, find_quantization
    from wan_core.pipeline.loading import load_parts
    from wan_core.pipeline.rehearsal import Rehearsal, forward_once
    from wan_core.pipeline.resolved_request import make_job
    from wan_core.pipeline.sources import find_experts

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
    artifacts = None
    if options.compile != "off":
        artifacts = Artifacts.open(device, {"precision": "fp8" if fp8 else str(dtype)})
    rehearsal = Rehearsal(
        config=experts.dit,
        device=device,
        dtype=dtype,
        quantization=fp8,
        attend=attend,
        compile=options.compile,
        job=job,
        artifacts=artifacts,
    )
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
        models = load_parts(list(parts), load, device, in_order=False, rehearsal=rehearsal)
        settle(device)
        lap("load both experts, prepare")
        for model in models.values():
            optimize(model, attend=attend, compile=options.compile, device=device, graphs=False)  # type: ignore
        made_anew = compiled_anew if artifacts is not None else lambda: 0  # asking imports the compiler
        before, (graphs, _) = made_anew(), compile_counts()
        forward_once(models["high"], job, "high", device)  # type: ignore
        settle(device)
        lap("first forward")
        left = {"graphs": compile_counts()[0] - graphs, "compiled anew": made_anew() - before}
        start = time.time()
        forward_once(models["high"], job, "high", device)  # type: ignore
        settle(device)
        warm = round(time.time() - start, 3)
    if artifacts is not None:
        artifacts.save(compilations(), compiled_anew())
    return {
        "warm_forward": warm,
        "read": max(read.values()),
        "prepared": {name: round(seconds, 3) for name, seconds in rehearsal.phases.items()},
        "first_forward": left,
        "note": "; ".join(rehearsal.notes),
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

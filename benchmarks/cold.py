"""One cold process, timed by phase: `python -m benchmarks.cold DEVICE SIZE HIGH LOW` prints JSON.

It imports, loads both experts, in FP8 where the device multiplies it, makes the first forward of the high-noise expert
at SIZE, and a second one: what a warm forward takes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
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
    importlib.import_module("wan_core.pipeline.pipeline")  # and with it nearly all of the package
    lap("import wan_core")
    if options.device.startswith("cuda"):
        torch.zeros(1, device=options.device)
    lap("CUDA context")
    with torch.no_grad():
        found = run(options, lap)
    print(json.dumps({"phases": phases, **found}))


def run(options: argparse.Namespace, lap: Callable[[str], None]) -> dict[str, Any]:
    """Load, and make the first forwards."""
    import torch

    from benchmarks.cases import make_case
    from benchmarks.loading import load_experts, staged
    from benchmarks.measure import settle
    from wan_core.execution.optimize import optimize
    from wan_core.ops.attention.registry import resolve_attention
    from wan_core.ops.quant.schemes import SCHEMES
    from wan_core.pipeline.settings import find_quantization

    device = torch.device(options.device)
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    fp8 = find_quantization("fp8", device) if cuda and SCHEMES["fp8"].why_not(device) is None else None
    high, low = load_experts([options.high, options.low], device, dtype, fp8, staged())
    settle(device)
    lap("load both experts")
    attend = resolve_attention("auto", device, dtype, high.config.head_dim)[1]
    lap("attention's library")
    for model in (high, low):
        optimize(model, attend=attend, device=device)

    def forward() -> None:
        case = make_case(high, options.size, 16 if high.config.in_channels == 48 else 8)
        high(case.x, case.timestep, high.prepare_text(case.contexts[0]))
        settle(device)

    forward()
    lap("first forward")
    start = time.time()
    forward()
    return {"warm_forward": round(time.time() - start, 3)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("device")
    parser.add_argument("size")
    parser.add_argument("high", type=Path)
    parser.add_argument("low", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

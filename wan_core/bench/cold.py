"""One cold process, timed by phase: `python -m wan_core.bench.cold DEVICE SIZE HIGH LOW` prints JSON.

Imports, loads both experts in FP8 where the device multiplies it, compiles the block, makes the first forward of the
high-noise expert at SIZE, and a second one, which is what a warm forward takes.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main(arguments: list[str]) -> None:
    begin = float(os.environ.get("WANCORE_BEGIN", time.time()))
    phases: dict[str, float] = {}

    def lap(name: str) -> None:
        nonlocal begin
        now = time.time()
        phases[name] = round(now - begin, 3)
        begin = now

    from concurrent.futures import ThreadPoolExecutor
    from pathlib import Path

    import torch

    from wan_core.artifacts import Artifacts
    from wan_core.attention.registry import resolve_attention
    from wan_core.bench.cases import make_case
    from wan_core.checkpoint import load_dit
    from wan_core.models import choose_device, find_quantization
    from wan_core.optimize import compilations, optimize
    from wan_core.quant.schemes import SCHEMES

    device = choose_device(arguments[0])
    torch.zeros(1, device=device)
    lap("import, CUDA")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    fp8 = find_quantization("fp8", device) if device.type == "cuda" and SCHEMES["fp8"].why_not(device) is None else None
    artifacts = Artifacts.open(device, {"precision": "fp8" if fp8 else str(dtype)})
    note = artifacts.load()
    lap("artifacts")

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with ThreadPoolExecutor(2) as pool, torch.no_grad():
        paths = [Path(path) for path in arguments[2:]]
        loading = [pool.submit(load_dit, path, device=device, dtype=dtype, quantization=fp8) for path in paths]
        models = [future.result() for future in loading]
        settle()
        lap("load both experts")
        attend = resolve_attention("auto", device, dtype, models[0].config.head_dim)[1]
        for model in models:
            optimize(model, attend=attend, compile="blocks", device=device, graphs=False)
        case = make_case(models[0], arguments[1], 16 if models[0].config.in_channels == 48 else 8)
        text = models[0].prepare_text(case.contexts[0])
        models[0](case.x, case.timestep, text)
        settle()
        lap("first forward, compiling")
        start = time.time()
        models[0](case.x, case.timestep, text)
        settle()
        warm = round(time.time() - start, 3)
    artifacts.save(compilations())
    print(json.dumps({"phases": phases, "warm_forward": warm, "note": note}))


if __name__ == "__main__":
    main(sys.argv[1:])

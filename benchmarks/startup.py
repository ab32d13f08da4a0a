"""Suite `startup`: how long until something happens. Loading both experts, and a cold process up to its first step.

Both experts are written to `--scratch` first, random values in bf16, 28.6 GB each at full size (`--layers` for less),
and are in the page cache then. `--setting load` and `cold` measure a part of it alone. Rows, by name:

load_file              safetensors' own, `load_file(device=...)`, both files one after the other: what ratios refer to
ours, bf16             our loader into both modules at once; ours, mapped: without pinned buffers
ours, fp8              the same, every matrix quantised on the way

seconds, spread   until all tensors are on the device; the median of the runs
gb_s              bytes of the files over that time
host_gib          the largest resident size of the process meanwhile, less what it had before; mapped pages count

cold process           a new process that imports, loads both experts in FP8 and makes one forward at the largest size.
                       "nothing kept": the caches of Triton and flash-attn-4 are empty. "kernels kept": they hold what
                       that process compiled; the median of `--runs` (3)

seconds                until that forward has run, without its own time when warm (`warm_forward`)
phases                 of it, one after the other. "import wan_core" ends with the pipeline; "attention's library" has
                       its imports; "first forward" is what the first forward takes in all
process_seconds        as its parent sees it, with the second forward and the end
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.loading import Loading
from benchmarks.measure import make_room
from benchmarks.options import STARTUP_PARTS
from benchmarks.rows import Row, guarded
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import save
from wan_core.config import OptionError
from wan_core.models.wan.families import find_task
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.sources import RANDOM, TINY


def startup_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Rows of the suite. Raises OptionError where there is no room for the files."""
    wanted = options.setting or STARTUP_PARTS
    details |= {"layers": options.layers}
    with tempfile.TemporaryDirectory(dir=options.scratch, prefix="wancore-startup-") as folder:
        files = write_experts(name, Path(folder), device, options.layers)
        details |= {"bytes": sum(file.stat().st_size for file in files)}
        if "load" in wanted:
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            yield from Loading(files, device, dtype, options.runs or 2).rows()
        if "cold" in wanted:
            yield from cold_rows(files, sizes[-1], device, Path(folder), options.runs or 3)


def write_experts(name: str, folder: Path, device: torch.device, layers: int | None) -> list[Path]:
    """Two experts as files, in the page cache when this returns."""
    if not name.startswith("random:"):
        return [TINY / "t2v_high.safetensors", TINY / "t2v_low.safetensors"]
    task = find_task(name.removeprefix("random:"))
    if task.name not in RANDOM:
        raise OptionError(f"random weights are made for {', '.join(RANDOM)}; for {task.name} use --model tiny")
    config = RANDOM[task.name][0]
    config = replace(config, num_layers=layers or config.num_layers)
    files = [folder / f"{expert}.safetensors" for expert in ("high", "low")]
    for seed, file in enumerate(files):
        module = random_module(config, device=device, dtype=torch.bfloat16, seed=seed)
        assert isinstance(module, WanModel)
        save(module, file)
        del module
        make_room(device)
    os.sync()  # what is being written would slow down what is being read
    return files


# --------------------------------------------------------------------------------------------------------- cold process


def cold_rows(files: list[Path], size: str, device: torch.device, folder: Path, runs: int) -> Iterator[Row]:
    """One process with empty caches, then `runs` with the caches that it filled."""
    kept, first = folder / "kept", None
    for name, times in {"nothing kept": 1, "kernels kept": runs}.items():
        row = guarded(
            f"cold process, {name}",
            size,
            None,
            lambda n=times: median_of([cold(files, size, device, kept) for _ in range(n)]),
        )
        first = first or row.get("seconds")
        if first and "seconds" in row:
            row |= {"ratio": round(first / row["seconds"], 4), "ratio_to": "cold process, nothing kept"}
        yield row


def median_of(rows: list[Row]) -> Row:
    """The one in the middle, the slower of two, with the seconds of all."""
    rows = sorted(rows, key=lambda row: row["seconds"])
    all_of_them = [row["seconds"] for row in rows]
    return rows[len(rows) // 2] | ({"all_seconds": all_of_them} if len(rows) > 1 else {})


def cold(files: list[Path], size: str, device: torch.device, kept: Path) -> Row:
    """Start one process and read what it printed. kept: the folder of its compilers' caches."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cold", str(device), size, *map(str, files)],
        env={**os.environ, **caches_in(kept), "WANCORE_BEGIN": repr(time.time())},
        capture_output=True,
        text=True,
        timeout=600,
    )
    whole = time.perf_counter() - begin
    if done.returncode:
        raise RuntimeError(f"the process failed: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    to_step = sum(found["phases"].values())
    return {"seconds": round(to_step - found["warm_forward"], 3), **found, "process_seconds": round(whole, 3)}


def caches_in(folder: Path) -> dict[str, str]:
    """The environment of a process whose compilers keep everything in `folder`."""
    return {
        "WANCORE_CACHE": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder / "flash-attention"),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    }

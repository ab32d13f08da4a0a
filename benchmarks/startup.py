"""Suite `startup`: how long until something happens. Loading both experts, a cold process up to its first step,
and a pipeline that is warm.

Both experts are written to `--scratch` first, random values in bf16, 28.6 GB each at full size (`--layers` for less),
and are in the page cache then. `--setting load`, `cold` and `ready` measure a part of it alone. Rows, by name:

load_file              safetensors' own, `load_file(device=...)`, both files one after the other: what ratios refer to
fastsafetensors,       peers, where they are installed
runai
ours, bf16             our loader into both modules at once; ours, mapped: without staging
ours, fp8              the same, every matrix quantised on the way

seconds, spread   until all tensors are on the device; the median of the runs
gb_s              bytes of the files over that time
host_gib          the largest resident size of the process meanwhile, less what it had before; mapped pages count
identical         whether every tensor is bit for bit that of load_file (fp8: of the plain path)

cold process           a new process that imports, loads both experts in FP8, prepares the first step, and makes
                       one forward at the largest size. "nothing kept": blocks compiled, with empty caches. "artifacts
                       kept": what that process left is there. "not compiled": the default, which compiles no block,
                       the first time and with the kernels that it kept. Where all is kept, the median of `--runs` (3).

seconds                until that forward has run, without its own time when warm
phases                 of it, one after the other. "import wan_core" ends with `models`; "attention's library" has its
                       imports; "first forward" whatever was not prepared
prepared               seconds of importing torch's compiler and finding artifacts, before the loading, and of a forward
                       of one block beside it, where there were none; `read` until the last weight was there
first_forward          graphs that the first forward still asked torch for, and how many entries no cache had for them
process_seconds        as its parent sees it, with the second forward and the end

Rows of `ready` (the module of that name) follow: a pipeline from its first prompt on.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import make_room, settle
from benchmarks.options import STARTUP_PARTS
from benchmarks.process import host_peak, reset_host_peak
from benchmarks.ready import ready_rows
from wan_core.checkpoint import load_dit
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import save
from wan_core.checkpoint.staged import Reading, default_threads, reading
from wan_core.config import OptionError
from wan_core.execution.compile_cache import OWN_CACHES
from wan_core.execution.report import GIB
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.tasks import find_task
from wan_core.pipeline.builder import find_quantization
from wan_core.pipeline.evaluate.results import Row, guarded
from wan_core.pipeline.sources import RANDOM, TINY

RATIO_TO = "load_file"


def startup_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Rows of the suite. Raises OptionError where there is no room for the files."""
    wanted = options.setting or STARTUP_PARTS
    if options.profile and "cold" not in wanted:
        raise OptionError(f"--profile is of a cold process, and --setting {', '.join(wanted)} starts none")
    details |= {"layers": options.layers}
    if "load" in wanted or "cold" in wanted:
        with tempfile.TemporaryDirectory(dir=options.scratch, prefix="wancore-startup-") as folder:
            files = write_experts(name, Path(folder), device, options.layers)
            details |= {"bytes": sum(file.stat().st_size for file in files)}
            if "load" in wanted:
                dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
                yield from Loading(files, device, dtype, options.runs or 2).rows()
            if "cold" in wanted:
                yield from cold_rows(files, sizes[-1], device, Path(folder), options.runs or 3, options.profile)
    if "ready" in wanted:
        yield from ready_rows(name, sizes, device, options.layers)


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


class Loading:
    """The ways to get both files' tensors onto the device."""

    def __init__(self, files: list[Path], device: torch.device, dtype: torch.dtype, runs: int) -> None:
        self.files, self.device, self.dtype, self.runs = files, device, dtype, runs
        self.bytes = sum(file.stat().st_size for file in files)
        self.reference: float | None = None

    def rows(self) -> Iterator[Row]:
        fp8 = find_quantization("fp8", self.device)
        ways: dict[str, tuple[str | None, Callable[[], Any]]] = {
            RATIO_TO: (None, self._load_file),
            "fastsafetensors": (_missing("fastsafetensors"), self._fastsafetensors),
            "runai": (_missing("runai_model_streamer"), self._runai),
            "ours, mapped": (None, lambda: self._ours(Reading(staged=False), None)),
            "ours, bf16": (None, lambda: self._ours(Reading(mapped=False, threads=default_threads() // 2), None)),
            "ours, fp8": (None, lambda: self._ours(Reading(mapped=False, threads=default_threads() // 2), fp8)),
        }
        for name, (reason, make) in ways.items():
            row = guarded(name, "both experts", reason, lambda m=make: self._timed(m))
            if name == RATIO_TO:
                self.reference = row.get("seconds")
            if self.reference and "seconds" in row:
                row |= {"ratio": round(self.reference / row["seconds"], 4), "ratio_to": RATIO_TO}
            if name == "ours, bf16" and "seconds" in row:
                row["identical"] = self._same_as_load_file()
            if name == "ours, fp8" and "seconds" in row:
                row["identical"] = self._same_quantised(fp8)
            yield row

    def _timed(self, make: Callable[[], Any]) -> Row:
        seconds, peak = [], 0
        for _ in range(self.runs):
            make_room(self.device)
            before = reset_host_peak()
            begin = time.perf_counter()
            held = make()
            settle(self.device)
            seconds.append(time.perf_counter() - begin)
            peak = max(peak, host_peak() - before)
            del held
            gc.collect()
        seconds.sort()
        median = seconds[len(seconds) // 2] if len(seconds) % 2 else sum(seconds[len(seconds) // 2 - 1 :][:2]) / 2
        return {
            "seconds": round(median, 4),
            "spread": round(seconds[-1] - seconds[0], 4),
            "gb_s": round(self.bytes / median / 1e9, 2),
            "host_gib": round(peak / GIB, 3),
        }

    def _load_file(self) -> list[dict[str, Tensor]]:
        from safetensors.torch import load_file

        return [load_file(str(file), device=str(self.device)) for file in self.files]

    def _ours(self, how: Reading, quantization: Any) -> list[WanModel]:
        def load(file: Path) -> WanModel:
            with reading(how):
                return load_dit(file, device=self.device, dtype=self.dtype, quantization=quantization)

        with ThreadPoolExecutor(len(self.files)) as pool:
            return list(pool.map(load, self.files))

    def _fastsafetensors(self) -> list[Any]:
        from fastsafetensors import fastsafe_open  # type: ignore

        held = []
        for file in self.files:
            with fastsafe_open(filenames=[str(file)], nogds=True, device=str(self.device)) as opened:
                held.append({name: opened.get_tensor(name).clone() for name in opened.keys()})  # noqa: SIM118
        return held

    def _runai(self) -> list[Any]:
        from runai_model_streamer import SafetensorsStreamer  # type: ignore

        held = []
        for file in self.files:
            with SafetensorsStreamer() as streamer:
                streamer.stream_file(str(file))
                held.append({name: tensor.to(self.device) for name, tensor in streamer.get_tensors()})
        return held

    def _same_as_load_file(self) -> bool:
        """Of the first file: two copies of both need not fit."""
        from safetensors.torch import load_file

        make_room(self.device)
        exact = load_file(str(self.files[0]), device=str(self.device))
        with reading(Reading(mapped=False)):
            ours = dict(load_dit(self.files[0], device=self.device, dtype=self.dtype).named_parameters())
        return set(ours) == set(exact) and all(
            torch.equal(ours[name], value.to(self.dtype)) for name, value in exact.items()
        )

    def _same_quantised(self, quantization: Any) -> bool:
        make_room(self.device)
        found = []
        for how in (Reading(staged=False), Reading(mapped=False)):
            with reading(how):
                model = load_dit(self.files[0], device=self.device, dtype=self.dtype, quantization=quantization)
            found.append(model.state_dict())
        plain, staged = found
        return set(plain) == set(staged) and all(
            torch.equal(plain[name].view(torch.uint8), staged[name].view(torch.uint8)) for name in plain
        )


def _missing(module: str) -> str | None:
    from importlib.util import find_spec

    return None if find_spec(module) else f"{module} is not installed"


# --------------------------------------------------------------------------------------------------------- cold process


def cold_rows(
    files: list[Path], size: str, device: torch.device, folder: Path, runs: int, profile: Path | None = None
) -> Iterator[Row]:
    """Processes, from the second on with what the first one kept. profile: where another one writes what took long."""
    kept = folder / "kept"
    first = None
    off = ["--compile", "off"]
    ways = {
        "nothing kept": ([], 1),
        "artifacts kept": ([], runs),
        "not compiled, first time": (off, 1),
        "not compiled": (off, runs),
    }
    for name, (more, times) in ways.items():
        row = guarded(
            f"cold process, {name}",
            size,
            None,
            lambda m=more, t=times: median_of([cold(files, size, device, kept, m) for _ in range(t)]),
        )
        first = first or row.get("seconds")
        if first and "seconds" in row:
            row |= {"ratio": round(first / row["seconds"], 4), "ratio_to": "cold process, nothing kept"}
        yield row
    if profile is not None:
        more = ["--profile", str(profile.absolute())]
        yield guarded("cold process, profiled", size, None, lambda: cold(files, size, device, kept, more))


def median_of(rows: list[Row]) -> Row:
    """The one in the middle, the slower of two, with the seconds of all."""
    rows = sorted(rows, key=lambda row: row["seconds"])
    all_of_them = [row["seconds"] for row in rows]
    return rows[len(rows) // 2] | ({"all_seconds": all_of_them} if len(rows) > 1 else {})


def cold(files: list[Path], size: str, device: torch.device, kept: Path, more: list[str]) -> Row:
    begin = time.perf_counter()
    found = json.loads(child(files, size, device, kept, more).splitlines()[-1])
    whole = time.perf_counter() - begin
    to_step = sum(found["phases"].values())
    return {"seconds": round(to_step - found["warm_forward"], 3), **found, "process_seconds": round(whole, 3)}


def child(files: list[Path], size: str, device: torch.device, kept: Path, more: list[str]) -> str:
    """What such a process prints. kept: where compilers keep what they make."""
    environment = dict(os.environ) | {"WANCORE_CACHE": str(kept)}
    for name in OWN_CACHES:
        environment.pop(name, None)  # in ours then
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cold", str(device), size, *map(str, files), *more],
        env=environment | {"WANCORE_BEGIN": repr(time.time())},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"the process failed: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout

"""Time, memory and compilations of something that runs more than once."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wan_core.execution.report import GIB


@dataclass(frozen=True)
class Measured:
    """`seconds` of each timed run; `output` of the last, float32. Bytes are of device memory, 0 on a CPU."""

    seconds: tuple[float, ...]
    first_seconds: float  # of the run before, which loads kernels and compiles
    peak: int
    before: int  # allocated before anything that the runs need was made
    compilations: int  # graphs that torch.compile made, in all of it
    graph_breaks: int
    output: Tensor

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def numbers(self) -> dict[str, Any]:
        """The numbers of a row. Memory: the peak, and what of it is there only while a forward runs."""
        row: dict[str, Any] = {
            "seconds": round(self.median, 5),
            "spread": round(max(self.seconds) - min(self.seconds), 5),
        }
        if self.peak:
            row["peak_gib"] = round(self.peak / GIB, 3)
            row["activation_gib"] = round((self.peak - self.before) / GIB, 3)
        if self.compilations:
            row["compile_seconds"] = round(max(0.0, self.first_seconds - self.median), 2)
            row["compilations"], row["graph_breaks"] = self.compilations, self.graph_breaks
        return row


@torch.no_grad()
def measure(prepare: Callable[[], Callable[[], Tensor]], device: torch.device, runs: int) -> Measured:
    """What `prepare` returns, run once and then `runs` times. What `prepare` makes counts as its memory."""
    cuda = device.type == "cuda"
    settle(device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    compiled = compile_counts()
    run = prepare()
    settle(device)
    begin = time.perf_counter()
    run()
    settle(device)
    first = time.perf_counter() - begin
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)  # compiling and choosing kernels may have taken more
    seconds, output = [], None
    for _ in range(runs):
        output = None
        begin = time.perf_counter()
        output = run()
        settle(device)
        seconds.append(time.perf_counter() - begin)
    assert output is not None
    graphs, breaks = (after - earlier for after, earlier in zip(compile_counts(), compiled, strict=True))
    peak = torch.cuda.max_memory_allocated(device) if cuda else 0
    return Measured(tuple(seconds), first, peak, before, graphs, breaks, output.float())


def settle(device: torch.device) -> None:
    """Wait for what was queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_room(device: torch.device) -> None:
    """Give memory of what is no longer referred to back to the device, cycles included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compile_counts() -> tuple[int, int]:
    """(graphs compiled, graph breaks) in this process so far, as torch counts them."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not there: nothing was compiled, and importing it takes seconds
    if dynamo is None:
        return 0, 0
    return dynamo.counters["stats"]["unique_graphs"], sum(dynamo.counters["graph_break"].values())


def weights_bytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers, each memory once."""
    storages = [t.untyped_storage() for t in (*module.parameters(), *module.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def relative_error(output: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the norm of `reference`, three digits."""
    reference = reference.to(output.device)
    return float(f"{float((output - reference).norm() / reference.norm()):.3g}")

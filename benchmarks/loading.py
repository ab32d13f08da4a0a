"""Suite `startup`: ways to read two experts from files onto the device, ours and that of safetensors."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import host_peak, make_room, reset_host_peak, settle
from benchmarks.rows import Row, guarded
from wan_core.checkpoint import load_dit
from wan_core.checkpoint.staged import Reading, default_threads
from wan_core.execution.report import GIB
from wan_core.models.wan.model import WanModel
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.settings import find_quantization

RATIO_TO = "load_file"


def load_experts(
    files: Sequence[Path], device: torch.device, dtype: torch.dtype, quantization: Quantization | None, how: Reading
) -> list[WanModel]:
    """All files at once, a thread for each."""

    def load(file: Path) -> WanModel:
        return load_dit(file, device=device, dtype=dtype, quantization=quantization, how=how)

    with ThreadPoolExecutor(len(files)) as pool:
        return list(pool.map(load, files))


def staged() -> Reading:
    """Through pinned buffers; the two files share the reader threads."""
    return Reading(mapped=False, threads=default_threads() // 2)


class Loading:
    """The ways to read both files onto the device, each with its seconds."""

    def __init__(self, files: list[Path], device: torch.device, dtype: torch.dtype, runs: int) -> None:
        self.files, self.device, self.dtype, self.runs = files, device, dtype, runs
        self.bytes = sum(file.stat().st_size for file in files)
        self.reference: float | None = None

    def rows(self) -> Iterator[Row]:
        fp8 = find_quantization("fp8", self.device)
        ways: dict[str, Callable[[], Any]] = {
            RATIO_TO: self._load_file,
            "ours, mapped": lambda: self._ours(Reading(staged=False), None),
            "ours, bf16": lambda: self._ours(staged(), None),
            "ours, fp8": lambda: self._ours(staged(), fp8),
        }
        for name, make in ways.items():
            row = guarded(name, "both experts", None, lambda m=make: self._timed(m))
            if name == RATIO_TO:
                self.reference = row.get("seconds")
            if self.reference and "seconds" in row:
                row |= {"ratio": round(self.reference / row["seconds"], 4), "ratio_to": RATIO_TO}
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

    def _ours(self, how: Reading, quantization: Quantization | None) -> list[WanModel]:
        return load_experts(self.files, self.device, self.dtype, quantization, how)

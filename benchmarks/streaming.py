"""Suite `streaming`: one forward with blocks that stream, against one with all of them resident, on smaller cards.

A smaller card is this one with a hard limit on what the process may allocate (`--memory-limit` of the command line does
the same); the copy engine and the link stay those of this machine. Random weights. For each precision and size, one row
for each card, by name ("fp8, 16 GiB"); the first of them, "resident", has the whole expert on the device.

seconds, spread   median of one forward of one branch, and the range
slowdown          seconds over those of the row "resident"
peak_gib          device memory at most, weights included, with both prompts prepared
planned_gib       the same as the memory plan said before, `plan_error` by how much it was off
resident_blocks   that stayed on the device
identical         whether the velocity is bit for bit that of "resident"
host_gib          pinned host memory of the expert
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.cases import Case, make_case, plain_model
from benchmarks.measure import make_room, measure
from benchmarks.options import STREAMING_PRECISIONS
from benchmarks.rows import Row, guarded
from wan_core.checkpoint.detect import empty_module
from wan_core.execution.memory.host_weights import HostWeights
from wan_core.execution.memory.planning import (
    Sizes,
    beside_weights,
    cap_memory,
    factor,
    limited,
    plan_memory,
    unit_bytes,
)
from wan_core.execution.memory.streaming import Stage
from wan_core.execution.optimize import optimize
from wan_core.execution.report import GIB
from wan_core.models.text.umt5 import UMT5_XXL
from wan_core.models.wan.families import choose_task
from wan_core.ops.attention.registry import resolve_attention
from wan_core.pipeline.settings import find_quantization

CARDS = (48.0, 32.0, 24.0, 16.0)  # GiB
VAE_BYTES = 254_000_000  # of the 2.1 VAE in bf16


def streaming_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Rows of the suite. On a CPU, numbers of resident blocks stand for cards."""
    details["emulated"] = "cards are limits on what the process may allocate of this device"
    for precision in options.setting or STREAMING_PRECISIONS:
        bench = Streaming(name, sizes, device, precision, options.layers, options.runs or 1)
        details["layers"] = len(bench.model.blocks)
        yield from bench.rows()
        bench.close()
        del bench
        make_room(device)


class Streaming:
    """One expert in one precision, its weights in pinned host memory."""

    def __init__(
        self, name: str, sizes: list[str], device: torch.device, precision: str, layers: int | None, runs: int
    ) -> None:
        self.name, self.device, self.precision, self.runs = name, device, precision, runs
        self.cuda, self.layers = device.type == "cuda", layers
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.held = find_quantization("fp8", device) if precision == "fp8" else None
        self.model, self.stride = plain_model(name, device, self.dtype, layers, self.held)
        self.attend = resolve_attention("auto", device, self.dtype, self.model.config.head_dim)[1]
        optimize(self.model, attend=self.attend)
        self.cases = [make_case(self.model, size, self.stride) for size in sizes]
        self.weights = HostWeights(self.model, lock=self.cuda)
        self.stage: Stage | None = None
        self.exact: dict[str, torch.Tensor] = {}
        self.seconds: dict[str, float] = {}

    def close(self) -> None:
        """Without limit again, and nothing on the device."""
        self._release()
        self._cap(None)

    def rows(self) -> Iterator[Row]:
        cards = CARDS if self.cuda else ()
        for case in self.cases:
            yield guarded(f"{self.precision}, resident", case.size, None, lambda c=case: self._row(c, None, None))
            for gib in cards:
                label = f"{self.precision}, {gib:g} GiB"
                yield guarded(label, case.size, None, lambda c=case, g=gib: self._row(c, g, None))
            for blocks in () if self.cuda else (0, len(self.model.blocks) // 2):
                label = f"{self.precision}, {blocks} blocks"
                yield guarded(label, case.size, None, lambda c=case, b=blocks: self._row(c, None, b))

    def _row(self, case: Case, gib: float | None, blocks: int | None) -> Row:
        config = self.model.config
        vae = choose_task(config).task.vae
        per_token = factor(
            config, itemsize=self.dtype.itemsize, device=self.device.type, compile="off", precision=self.precision
        )
        beside = beside_weights(config, vae, tuple(case.x.shape), per_token=per_token, itemsize=self.dtype.itemsize)
        units = unit_bytes(config, self.dtype.itemsize, self.held is not None)
        resident = blocks
        if gib is not None:
            text = sum(p.numel() for p in empty_module(UMT5_XXL).parameters()) * self.dtype.itemsize
            sizes = Sizes(units=units, experts=2, text_encoder=text, vae=VAE_BYTES)
            plan = plan_memory(sizes, beside, limited(gib))
            resident = plan.resident_blocks if plan.policy == "stream" else None
        self._release()
        self._cap(gib)
        self.stage = Stage(self.device, resident)
        self.model.runners.weights = self.stage

        def prepare():
            assert self.stage is not None
            self.stage.use(self.weights)
            texts = [self.model.prepare_text(context) for context in case.contexts]
            return lambda: self.model(case.x, case.timestep, texts[0])

        measured = measure(prepare, self.device, self.runs)
        planned = self.stage.nbytes(self.weights) + beside.denoise
        row: Row = {"tokens": case.tokens, **measured.numbers(), "host_gib": round(self.weights.nbytes / GIB, 3)}
        row["resident_blocks"] = len(self.model.blocks) if resident is None else resident
        row["planned_gib"] = round(planned / GIB, 3)
        if measured.peak:
            row["plan_error"] = round(planned / measured.peak - 1, 4)
        if gib is None and blocks is None:
            self.exact[case.size], self.seconds[case.size] = measured.output.cpu(), measured.median
        elif case.size in self.exact:
            row["identical"] = bool(torch.equal(measured.output.cpu(), self.exact[case.size]))
            row["slowdown"] = round(measured.median / self.seconds[case.size], 4)
            row |= {"ratio": round(self.seconds[case.size] / measured.median, 4)}
            row["ratio_to"] = f"{self.precision}, resident"
        return row

    def _release(self) -> None:
        if self.stage is not None:
            self.stage.leave_device()
            self.stage = None
        make_room(self.device)

    def _cap(self, gib: float | None) -> None:
        if not self.cuda:
            return
        if gib is None:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
        else:
            cap_memory(self.device, gib)

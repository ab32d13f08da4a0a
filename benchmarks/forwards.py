"""Forwards of one transformer in named settings: suites `forward` and `guidance`, and what is asked for by name."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.cases import Case, bench_model, make_case
from benchmarks.measure import measure, relative_error
from benchmarks.options import SUITES
from benchmarks.rows import Row
from benchmarks.settings import make_forward


def forward_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """A row for each size and setting; ratios and errors refer to the suite's first setting."""
    fixed = SUITES[options.suite].settings if options.suite else ()
    settings = options.setting or fixed or ("forward", "sequential", "batched")
    first = fixed[0] if fixed and fixed[0] in settings else settings[0]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
    model, stride = bench_model(name, device, dtype, options.layers)
    details |= {"layers": model.config.num_layers, "dtype": options.precision}
    cases = [make_case(model, size, stride) for size in sizes]  # all sizes are checked before the first is run
    for case in cases:
        yield from measure_case(case, [first, *(s for s in settings if s != first)], options.runs or 3)


def measure_case(case: Case, settings: list[str], runs: int) -> Iterator[Row]:
    """A row for each setting; ratios and errors refer to the first."""
    reference: tuple[Row, torch.Tensor] | None = None
    for setting in settings:
        measured = measure(lambda s=setting: make_forward(s, case), case.x.device, runs)
        row = {"name": setting, "size": case.size, "tokens": case.tokens, **measured.numbers()}
        reference = reference or (row, measured.output)
        row |= {"ratio": round(reference[0]["seconds"] / row["seconds"], 4), "ratio_to": reference[0]["name"]}
        if measured.output.shape == reference[1].shape:
            row["error"] = relative_error(measured.output, reference[1])
        yield row

"""Suite `attention`: a row for every backend, errors on every kind of data."""

from __future__ import annotations

import argparse

import torch

from benchmarks.attention import attention_rows
from wan_core.ops.attention.registry import BACKENDS


def test_every_backend_has_a_row_with_its_errors_or_a_reason():
    rows = attention_rows("tiny", ["32x32x5"], torch.device("cpu"), argparse.Namespace(runs=1), {})
    by_backend = {row["name"]: row for row in rows}
    assert by_backend.keys() == {*BACKENDS, "flex"} - {"math", "math-fp8"}
    sdpa = by_backend.pop("sdpa")
    assert sdpa["ratio"] == 1 and sdpa["seconds"] > 0
    assert all(sdpa[kind] < 1e-5 for kind in ("error", "offset", "outliers", "sinks"))
    assert all("NVIDIA GPU" in row["why_not"] for row in by_backend.values())

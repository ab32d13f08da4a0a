"""Suite `attention`: a row for every backend, errors on every kind of data, and tiles by name."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from benchmarks.attention import attention_rows
from benchmarks.run import check_options
from wan_core.config import OptionError
from wan_core.ops.attention.registry import BACKENDS

CPU = torch.device("cpu")


def rows(*setting: str) -> list[dict[str, Any]]:
    options = argparse.Namespace(setting=list(setting) or None, runs=1, steps=2)
    return list(attention_rows("tiny", ["32x32x5"], CPU, options, {}))


def test_every_backend_has_a_row_with_its_errors_or_a_reason():
    by_backend = {row["name"]: row for row in rows()}
    assert by_backend.keys() == {*BACKENDS, "flex"} - {"math", "math-fp8"}
    sdpa = by_backend.pop("sdpa")
    assert sdpa["ratio"] == 1 and sdpa["seconds"] > 0
    assert all(sdpa[kind] < 1e-5 for kind in ("error", "offset", "outliers", "sinks"))
    assert all("NVIDIA GPU" in row["why_not"] for row in by_backend.values())


def test_tiles_are_rows_of_both_kinds():
    names = [row["name"] for row in rows("tune")]
    assert len(names) == len(set(names)) > 20 and {name.partition(",")[0] for name in names} == {"bf16", "int8"}
    assert {row["name"].partition(",")[0] for row in rows("int8")} == {"int8"}
    options = argparse.Namespace(size=None, setting=["tiles"], setup=None, suite="attention")
    with pytest.raises(OptionError, match="has kernels, tune, bf16"):
        check_options(options)

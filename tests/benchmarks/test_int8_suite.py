"""Suite `int8`: a row for every way, in the order of what they lose."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.int8_forwards import ReencodedLinear, RotatedLinear, TorchLinear, all_blocks, decoded
from wan_core.ops.quant.int8 import Int8Linear


def test_every_way_is_a_row(tmp_path):
    command = ["int8", "--device", "cpu", "--precision", "fp32", "--size", "32x32x5", "--runs", "1"]
    assert main([*command, "--out", str(tmp_path / "x.json")]) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert "NVIDIA GPU" in rows.pop("int8")["why_not"]
    assert list(rows) == ["bf16", "fp8", "int8, torch", "int8 as fp8", "int8 as fp8, rotated"]
    assert rows["bf16"]["error"] == 0 < rows["int8, torch"]["error"] < rows["fp8"]["error"] < 0.2
    assert rows["fp8"]["weights_gib"] <= rows["bf16"]["weights_gib"] / 2
    assert all(row["scaled_seconds"] == pytest.approx(row["seconds"], abs=1e-4) for row in rows.values())


def test_random_weights_are_scaled_to_all_blocks():
    assert all_blocks("random:t2v-A14B", 4) == 40
    assert all_blocks("tiny", 4) == 4


@pytest.mark.parametrize("kind", [TorchLinear, ReencodedLinear, RotatedLinear])
def test_every_way_multiplies_what_the_file_holds(kind):
    torch.manual_seed(0)
    weight, x = torch.randn(32, 256), torch.randn(40, 256)
    linear = kind(256, 32, bias=False, dtype=torch.float32)
    linear.load(kind.encode(weight))
    exact = x @ decoded(weight).t()
    bound = 0.02 if issubclass(kind, Int8Linear) else 0.05
    assert (linear(x) - exact).norm() < bound * exact.norm()

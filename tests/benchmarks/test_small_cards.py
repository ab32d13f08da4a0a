"""The suite of smaller cards, on the embedded model: its rows, and what they call the same is the same."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main

FLIPS = 0.2
"""A CPU's sums depend on where weights lie in memory, and a number of FP8 or INT8 that is then rounded the other way
spreads over the steps: 0 to 0.08 of the latents."""


def test_rows(tmp_path):
    command = ["small-cards", "--device", "cpu", "--size", "32x32x5"]
    assert main([*command, "--out", str(tmp_path / "x.json")]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "x.json").read_text())["rows"]}
    assert rows["LoRA off"]["same_bytes"] and rows["streamed"]["streams_text"]
    assert rows["streamed"]["error"] < FLIPS
    assert rows["denoise, LoRA attached"]["ratio_to"] == "denoise, no LoRA"
    assert rows["full card"]["loras"] == {"high": "merge", "low": "merge"}


def test_experts_in_int8(tmp_path):
    command = ["small-cards", "--device", "cpu", "--size", "32x32x5", "--setting", "cards", "--setting", "int8"]
    assert main([*command, "--out", str(tmp_path / "x.json")]) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["experts"] == "int8" and [row["name"] for row in found["rows"]] == ["full card", "streamed"]
    assert found["rows"][1]["error"] < FLIPS


@pytest.mark.parametrize("options", [["--scratch", "/absent"], ["--model", "random:t2v-1.3B"], ["--setting", "vae"]])
def test_refusals(options):
    assert main(["small-cards", "--device", "cpu", *options]) == 2

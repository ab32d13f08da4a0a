"""The suite of smaller cards, on the embedded model: its rows, and what they call the same is the same."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import main


def test_rows(tmp_path):
    command = ["small-cards", "--device", "cpu", "--size", "32x32x5"]
    assert main([*command, "--out", str(tmp_path / "x.json")]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "x.json").read_text())["rows"]}
    assert rows["LoRA off"]["same_bytes"] and rows["streamed"]["streams_text"]
    assert rows["streamed"]["error"] < 1e-5  # a CPU's sums depend on where weights lie
    assert rows["denoise, LoRA attached"]["ratio_to"] == "denoise, no LoRA"
    assert rows["full card"]["loras"] == {"high": "merge", "low": "merge"}


@pytest.mark.parametrize("options", [["--scratch", "/absent"], ["--model", "random:t2v-1.3B"], ["--setting", "vae"]])
def test_refusals(options):
    assert main(["small-cards", "--device", "cpu", *options]) == 2

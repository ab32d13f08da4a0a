"""The suites that the ladder adds: whole videos of the command line and the tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import own_tests
from benchmarks.__main__ import main
from benchmarks.own_tests import run_tests
from benchmarks.videos import Making

CPU = torch.device("cpu")


def report(load: float) -> dict:
    phases = {"load": {"seconds": load}, "denoise high": {"seconds": 3.0}, "denoise low": {"seconds": 1.5}}
    return {"phases": phases, "peak_device_gib": 1.5, "notes": ["a note"]}


def test_videos_are_cold_then_kept() -> None:
    making = Making(Path(), ["--model", "tiny"], CPU, 1, [], "64x64x5", 3)
    cold, warm = making.timed([20.0, 26.0, 31.0, 38.0], [report(9.0), report(0.0), report(0.0), report(0.0)])
    numbers = {"name": "cold", "size": "64x64x5", "seconds": 20.0, "load": 9.0, "denoise": 4.5, "peak_gib": 1.5}
    phases = {"load": 9.0, "denoise high": 3.0, "denoise low": 1.5}
    assert cold == {**numbers, "phases": phases, "notes": ["a note"]}
    assert (warm["seconds"], warm["spread"], warm["runs"], warm["denoise"]) == (6.0, 2.0, 3, 4.5) and "load" not in warm


def test_a_list_on_several_gpus_counts_videos_after_the_first_of_each() -> None:
    making = Making(Path(), ["--model", "tiny"], CPU, 2, [], "64x64x5", 1)
    assert making.makers == 2 and making.count == 4
    _, row = making.timed([10.0, 11.0, 15.0, 17.0], [report(1.0)] * 4)
    assert row["seconds"] == 3.0 and (row["videos"], row["gpus"]) == (4, 2)
    assert Making(Path(), ["--model", "tiny"], CPU, 2, ["--mesh", "2x1x1"], "64x64x5", 1).makers == 1


def test_a_list_of_the_embedded_model(tmp_path: Path) -> None:
    lora = "{models}/loras/wan2.2_i2v_lightx2v_4steps_lora_v1_high_noise.safetensors"
    setting = f"four steps: --preset 4-step --lora high={lora}"
    options = ["--size", "64x64x5", "--runs", "1", "--device", "cpu", "--scratch", str(tmp_path)]
    out = tmp_path / "result.json"
    wrong = ["--setting", "wrong: --steps 0"]  # refused by the command line at once
    assert main(["videos", "--model", "files:i2v", "--setting", setting, *wrong, *options, "--out", str(out)]) == 1
    cold, warm, failed = json.loads(out.read_text())["rows"]
    assert cold["name"] == "four steps: cold" and cold["seconds"] > warm["seconds"] >= warm["denoise"] > 0
    assert failed["name"] == "wrong" and "steps" in failed["failed"]


def test_files_have_rows_as_their_tests_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_tests, "PROCESSES", 1)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:hypothesispytest")  # seconds of each process
    path = tmp_path / "test_it.py"
    path.write_text(
        "import pytest\n\ndef test_one():\n    pass\n\ndef test_two():\n    assert 1 == 2\n\n"
        "@pytest.mark.skip\ndef test_three():\n    pass\n\n@pytest.mark.alone\ndef test_four():\n    pass\n"
    )
    details: dict = {}
    *first, last = run_tests("all", "not gpu", [str(path)], details)
    assert len(first) == 3
    assert (last["passed"], last["skipped"], last["faults"]) == (2, 1, 1) and "assert 1 == 2" in last["failed"]
    assert details["over"] and last["name"].endswith("test_it.py")
    (wrong,) = run_tests("all", "not gpu", [str(tmp_path / "absent.py")], details)
    assert "pytest ended with" in wrong["failed"] and not details["over"]

"""The benchmark: what it counts is what ran, what it compares computes the same, and what cannot run says so."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main as bench_main
from benchmarks.cases import make_case
from benchmarks.peers import PEERS
from benchmarks.setups import find_setup
from benchmarks.single import Ladder
from tests.comfyui import find_comfyui, python_of
from wan_core.checkpoint.random import random_module
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel

CPU = torch.device("cpu")
SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=128, ffn_dim=256, num_heads=2, num_layers=2, text_dim=48, text_len=32
)
TORCH_ONLY = "plain/sdpa/torch"  # as `plain torch`, under another name: rows that must agree with it


def small_model(config: DiTConfig = SMALL, **options: Any) -> WanModel:
    model = random_module(config, device=CPU, dtype=torch.float32, **options)
    assert isinstance(model, WanModel)
    return model


def bench(out: Path, *arguments: str) -> dict[str, Any]:
    """The file that `bench` writes for the embedded model on the CPU; it must end well."""
    path = out / "bench.json"
    assert bench_main([*arguments, "--device", "cpu", "--out", str(path)]) == 0
    return json.loads(path.read_text())


# ---------------------------------------------------------------------------------------------------------------- peers


@pytest.mark.parametrize("channels", [(16, 16), (36, 16)])
def test_diffusers_computes_what_ours_does_on_the_same_memory(channels) -> None:
    model = small_model(replace(SMALL, in_channels=channels[0], out_channels=channels[1]))
    case = make_case(model, "48x64x9", 8)
    peer, run = PEERS["diffusers"].ready(model)
    with torch.no_grad():
        ours, theirs = model(case.x, case.timestep, case.contexts[0]), run(case.x, case.timestep, case.contexts[0])
    assert float((theirs - ours).norm() / ours.norm()) <= 1e-4
    assert {p.data_ptr() for p in peer.parameters()} <= {p.data_ptr() for p in model.parameters()}


@pytest.mark.comfy
def test_comfyui_computes_what_ours_does(tmp_path: Path) -> None:
    """In ComfyUI's own Python, which has what it needs; as a user would measure it."""
    checkout, out = find_comfyui(), tmp_path / "bench.json"
    arguments = ["--model", "tiny", "--device", "cpu", "--precision", "fp32", "--size", "64x48x5", "--runs", "1"]
    chosen = ["--setup", "comfyui", "--setup", TORCH_ONLY, "--out", str(out)]
    environment = {**os.environ, "COMFYUI_PATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [python_of(checkout), "-m", "benchmarks", "single", *arguments, *chosen]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["rows"][0]["name"] == "comfyui" and result["rows"][0]["error"] <= 1e-4
    assert result["versions"]["comfyui"] not in ("", "unknown")


# ----------------------------------------------------------------------------------------------------------- the ladder


def test_the_ladder_has_a_row_for_everything_that_was_asked_for(tmp_path: Path) -> None:
    """Numbers where it runs, the reason where it does not, and every size."""
    names = [
        "diffusers",
        "plain torch",
        TORCH_ONLY,
        "fp8/sdpa/torch",
        "fp8/math-fp8/torch",
        "+ flash4",
        "te-current/flash4",
    ]
    chosen = [argument for name in names for argument in ("--setup", name)]
    sizes = ["--size", "64x48x5", "--size", "48x48x9"]
    result = bench(tmp_path, "single", "--precision", "fp32", "--runs", "1", *sizes, *chosen)
    rows = {(row["size"], row["name"]): row for row in result["rows"]}
    assert rows.keys() == {(size, name) for size in ("64x48x5", "48x48x9") for name in names}
    assert [row["size"] for row in result["rows"]] == ["64x48x5"] * len(names) + ["48x48x9"] * len(names)
    assert result["versions"]["diffusers"]
    for size in ("64x48x5", "48x48x9"):
        for name in ("+ flash4", "te-current/flash4"):
            assert "GPU" in rows[size, name]["why_not"] and "seconds" not in rows[size, name]
        measured = {name: rows[size, name] for name in names[:5]}
        assert all(row["seconds"] > 0 for row in measured.values())
        assert measured["plain torch"]["error"] == measured[TORCH_ONLY]["error"] == 0
        assert 0 < measured["diffusers"]["error"] <= 1e-4
        errors = measured["fp8/sdpa/torch"]["error"], measured["fp8/math-fp8/torch"]["error"]
        assert errors[0] != errors[1] and all(0.01 < error < 0.12 for error in errors)
        assert measured["fp8/sdpa/torch"]["weights_gib"] < 0.5 * measured["plain torch"]["weights_gib"]


def test_a_row_that_fails_says_so_and_the_others_go_on() -> None:
    """FP8 needs multiples of 16: found when the linears are replaced, in a setup that the device could run."""
    config = replace(SMALL, dim=48, num_heads=2, ffn_dim=72)

    def model(precision):
        return small_model(config, quantization=precision), 8

    ladder = Ladder(model, ["48x48x5"], CPU, torch.float32, 1)
    rows = list(ladder.rows([find_setup("fp8/sdpa/torch"), find_setup(TORCH_ONLY)]))
    assert "multiples of 16" in rows[0]["failed"] and "seconds" not in rows[0]
    assert rows[1]["error"] == 0


def test_a_compiled_peer_reports_what_its_first_run_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is the one that ratios refer to, wherever it stands in the list. Traced and counted; the compiler behind that
    is left out."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    ladder = Ladder(lambda precision: (small_model(), 8), ["48x48x5"], CPU, torch.float32, 1)
    rows = list(ladder.rows([find_setup(TORCH_ONLY), PEERS["diffusers"], PEERS["diffusers-compiled"]]))
    assert [row["name"] for row in rows] == ["diffusers-compiled", "diffusers", TORCH_ONLY]
    compiled, eager, ours = rows
    assert compiled["compilations"] == 1 and compiled["graph_breaks"] == 0 and compiled["compile_seconds"] > 0
    assert compiled["ratio"] == 1 and compiled["error"] <= 1e-4
    assert "compilations" not in eager and "compilations" not in ours
    assert eager["ratio"] == pytest.approx(compiled["seconds"] / eager["seconds"], rel=1e-2)

"""The suite that drives a real ComfyUI: its files, its graphs, its clock, and our sides in a real server."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import comfy_files, everyday
from benchmarks.comfy_files import as_fp8, expert_file, write_expert, write_files
from benchmarks.comfy_graphs import Job, middle, native_graph, with_defaults
from benchmarks.comfy_server import Server
from benchmarks.comfy_small import small_graph
from benchmarks.comfyui import Graph
from benchmarks.everyday import (
    ACCELERATED,
    OFF_SIDES,
    Side,
    everyday_rows,
    ratios,
    several_sides,
)
from tests.comfyui import find_comfyui
from wan_core.checkpoint import detect, load_dit, open_checkpoint
from wan_core.pipeline.sources import TINY
from wan_core.sampling.plan import make_plan

CPU = torch.device("cpu")
SEVERAL = (*several_sides(2, CPU, guided=True), *several_sides(2, torch.device("cuda"), guided=True))
SCHEMAS = json.loads((Path(__file__).parents[1] / "nodes" / "node_schemas.json").read_text())
TINY_DIT = detect(open_checkpoint(TINY / "i2v_high.safetensors")).config
TINY_VAE = detect(open_checkpoint(TINY / "vae.safetensors")).config


def test_experts_are_written_with_other_numbers_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(comfy_files.RANDOM, "i2v-A14B", (TINY_DIT, TINY_VAE))
    weights = []
    for expert in ("high", "low"):
        write_expert(tmp_path, "i2v", expert, torch.device("cpu"), 2)
        path = tmp_path / "diffusion_models" / expert_file("i2v", expert, 2)
        state = load_dit(path, device="cpu", dtype=torch.float32).state_dict()
        assert len({name.split(".")[1] for name in state if name.startswith("blocks.")}) == 2
        weights.append(state["blocks.1.ffn.0.weight"])
    assert not torch.equal(*weights) and all(0 < weight.std() < 1 for weight in weights)


def test_the_largest_number_of_a_matrix_is_exact_in_fp8() -> None:
    weight = torch.randn(8, 16)
    scaled = as_fp8({"a.weight": weight, "b.weight": weight}, ["a"])
    largest = (scaled["a.weight"].float() * scaled["a.scale_weight"]).abs().max()
    assert largest == pytest.approx(float(weight.abs().max()), rel=1e-6)
    assert scaled["b.weight"] is weight and scaled["scaled_fp8"].numel() == 0


@pytest.mark.parametrize("job", [Job(), Job(four_steps=False)])
@pytest.mark.parametrize("make", [side.graph for side in (*OFF_SIDES, *ACCELERATED, *SEVERAL)])
def test_links_lead_somewhere_and_our_nodes_know_their_inputs(make: Any, job: Job) -> None:
    graph: Graph = make(job)
    for entry in graph.values():
        for name, value in entry["inputs"].items():
            if isinstance(value, list):
                assert value[0] in graph
            if entry["class_type"] in SCHEMAS:
                schema = SCHEMAS[entry["class_type"]]
                assert name in {item["name"] for item in schema["inputs"]}, (entry["class_type"], name)


@pytest.mark.parametrize("job", [Job(), Job(four_steps=False)])
def test_each_expert_has_half_of_the_steps_on_both_sides(job: Job) -> None:
    plan = make_plan(
        steps=job.total_steps,
        shift=job.shift,
        boundary=middle(job),
        guidance_high=job.guidance,
        guidance_low=job.guidance,
        solver="euler",
    )
    assert [step.expert for step in plan.steps].count("high") == job.total_steps // 2
    native = native_graph(job)
    assert native["samplers.high"]["inputs"]["end_at_step"] == job.total_steps // 2


def test_ratios_are_to_native_rows_of_one_gpu_and_of_as_many() -> None:
    def side(native: bool, gpus: int) -> Side:
        return Side("", native_graph, native, gpus)

    alone, both, ours, row = side(True, 1), side(True, 2), side(False, 2), {"seconds": 4.0}
    measured = [(alone, {"seconds": 12.0}), (alone, {"seconds": 16.0}), (both, {"seconds": 8.0}), (ours, row)]
    shown = {"ratio": 3.0, "ratio_to": everyday.PEER, "ratio_to_native_gpus": 2.0}
    assert ratios(ours, row, measured) == shown
    assert "ratio_to_native_gpus" not in ratios(side(False, 1), row, measured)
    assert ratios(ours, row, [(both, {"failed": "no"})]) == ratios(ours, {"failed": "no"}, measured) == {}


@pytest.mark.comfy
def test_every_side_in_a_real_server() -> None:
    """On small files, with a stand-in for the text encoder: native sides too."""
    options = argparse.Namespace(
        setting=["on", "fresh", "off", "cold"], scratch=None, checkout=find_comfyui(), layers=None, runs=1, gpus=1
    )
    options.setup, options.steps = None, 4
    rows = list(everyday_rows("", ["64x64x5"], CPU, options, {}))
    assert {row["name"].partition(": ")[0] for row in rows} == {
        "on, new seed", "on, new prompt and picture", "off", "cold"
    }  # fmt: skip
    assert {row["name"].rpartition(": ")[2] for row in rows} == {side.name for side in (*OFF_SIDES, *ACCELERATED)}
    for row in rows:
        if "Model Sparse Attention" in row["name"] and "why_not" in row:
            continue  # an older ComfyUI
        assert row["nodes"]["samplers"] > 0 and row["nodes"]["decode"] > 0, row
        if row["name"].startswith("cold"):
            assert 0 < row["progress"][0] < row["seconds"]
        else:
            assert "loaders" not in row["nodes"]  # the second prompt of a side finds its models loaded


@pytest.mark.comfy
def test_several_gpus_in_a_real_server(tmp_path: Path) -> None:
    """Two workers on the CPU; ComfyUI's own graph with a node that divides work is accepted."""
    options = argparse.Namespace(setting=["on", "off"], scratch=tmp_path, checkout=find_comfyui(), layers=2, runs=1)
    options.setup, options.steps, options.gpus = ["ours, cudnn-fp8, 2 GPUs", "native, on all GPUs, 2 GPUs"], None, 2
    rows = list(everyday_rows("", ["64x64x5"], CPU, options, {}))
    assert [(row["name"], row["gpus"]) for row in rows] == [
        (f"{part}: {side}", 2) for part in ("on, new seed", "off") for side in options.setup
    ]
    assert all(row["nodes"]["samplers"] > 0 and "failed" not in row for row in rows), rows
    with everyday.server_files(tmp_path, options.checkout) as (checkout, base), Server(checkout, base, CPU) as server:
        if "MultiGPU_WorkUnits" not in server.kinds:
            pytest.skip("this ComfyUI has no MultiGPU CFG Split")
        write_files(base / "models", CPU, "i2v", 2)
        for side in SEVERAL[:2]:
            graph = side.graph(Job(width=64, height=64, frames=5, four_steps=False, layers=2))
            server.comfyui.watch(
                with_defaults(small_graph(graph), server.kinds)
            )  # raises `Refused` where it is no graph

"""The suite that drives a real ComfyUI: its files, its graphs, its clock, and our sides in a real server."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks import comfy_files, everyday
from benchmarks.comfy_files import as_fp8, expert_file, write_expert, write_files
from benchmarks.comfy_graphs import Job, middle, native_graph, with_defaults
from benchmarks.comfy_small import small_graph
from benchmarks.comfyui import Graph
from benchmarks.everyday import SIDES, Side, everyday_rows, ratios, sides_for
from benchmarks.options import EVERYDAY_PARTS
from benchmarks.templates import core_sparse
from tests.comfyui import find_comfyui
from wan_core.checkpoint import detect, load_dit, open_checkpoint
from wan_core.pipeline.sources import TINY
from wan_core.sampling.plan import make_plan

CPU = torch.device("cpu")
SEVERAL = (*sides_for(2, torch.device("cuda")), *sides_for(2, CPU)[len(SIDES) :])
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
    assert as_fp8({"a.weight": weight}, ["a"], wide=True)["scaled_fp8"].numel() == 2


@pytest.mark.parametrize("job", [Job(), Job(four_steps=False)])
@pytest.mark.parametrize("make", [side.graph for side in SEVERAL])
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
    one, other, both = (Side(name, native_graph, True, gpus) for name, gpus in (("a", 1), ("b", 1), ("c", 2)))
    ours, alone = Side("d", native_graph, gpus=2), Side("e", native_graph)
    measured = {one: {"seconds": 12.0}, other: {"seconds": 16.0}, both: {"seconds": 8.0}}
    row = {"seconds": 4.0}
    shown = {"ratio": 3.0, "ratio_to": everyday.PEER, "ratio_to_native_gpus": 2.0}
    assert ratios(ours, {**measured, ours: row}) == shown
    assert "ratio_to_native_gpus" not in ratios(alone, {**measured, alone: row})
    failed = {"failed": "no"}
    assert ratios(ours, {both: failed, ours: row}) == ratios(ours, {**measured, ours: failed}) == {}


@pytest.mark.parametrize("by_heads", [False, True])
def test_cores_sparse_attention_is_asked_where_its_node_asks_it(
    by_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the window of noise levels, from 12,288 tokens on; all else is what the override before, or ComfyUI, says."""
    kitchen, asked = ModuleType("comfy_kitchen"), []

    def sol_attn(*qkv: torch.Tensor, tau: float, scale: float | None, token_aug: int) -> torch.Tensor:
        asked.append((tau, token_aug, {x.dtype for x in qkv}))
        return qkv[0] + 2 * qkv[2]

    kitchen.sol_attn = sol_attn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen)
    attend = core_sparse.attention(None, 1.3, 0.9, 0.1)

    def call(tokens: int, sigma: float, keys: int = 0) -> torch.Tensor:
        q, k, v = (torch.ones(1, n, 2 * 8) for n in (tokens, keys or tokens, keys or tokens))
        if by_heads:
            q, k, v = (x.unflatten(2, (2, 8)).transpose(1, 2) for x in (q, k, v))
        shape = {"skip_reshape": by_heads, "skip_output_reshape": by_heads}
        options = {"sigmas": torch.tensor([sigma])}
        out = attend(lambda q, *_, **__: q * 7, q, k, v, 2, **shape, transformer_options=options)
        assert out.shape == q.shape
        return out.unique()

    assert call(12288, 0.5) == 3 and asked == [(1.3, 256, {torch.bfloat16})]
    assert [call(12287, 0.5), call(12288, 0.95), call(12288, 0.05), call(12288, 0.5, keys=512)] == [7] * 4
    assert len(asked) == 1


@pytest.mark.comfy
def test_every_side_in_a_real_server() -> None:
    """On small files, with a stand-in for the text encoder: native sides too."""
    find_comfyui()
    options = argparse.Namespace(suite="everyday", scratch=None, layers=None, runs=1, gpus=1, steps=4, wide=True)
    few = ["native", "ours, auto"]
    chosen = {"on": None, "fresh": few, "t2v": few, "off": None, "cold": few}
    rows = []
    for options.setting, options.setup in zip(([part] for part in chosen), chosen.values(), strict=True):
        rows += everyday_rows("", ["64x64x5"], CPU, options, {})
    for part, label in EVERYDAY_PARTS.items():
        names = [row["name"].removeprefix(f"{label}: ") for row in rows if row["name"].startswith(f"{label}: ")]
        assert sorted(names) == sorted(chosen[part] or (side.name for side in SIDES))
    for row in rows:
        if "Model Sparse Attention" in row["name"] and "sol_attn" in row.get("failed", ""):
            continue  # an older comfy-kitchen
        assert row["nodes"]["samplers"] > 0 and row["nodes"]["decode"] > 0, row
        if row["name"].startswith("cold"):
            assert 0 < row["progress"][0] < row["seconds"]
        else:
            assert "loaders" not in row["nodes"]  # the second prompt of a side finds its models loaded


@pytest.mark.comfy
def test_several_gpus_in_a_real_server(tmp_path: Path) -> None:
    """Two workers on the CPU; ComfyUI's own graph with a node that divides work is accepted."""
    find_comfyui()
    options = argparse.Namespace(suite="everyday", scratch=tmp_path, layers=2, runs=1, steps=None, gpus=2, wide=False)
    options.setting, options.setup = ["on", "off"], ["ours, cudnn-fp8, 2 GPUs", "native, on all GPUs, 2 GPUs"]
    rows = list(everyday_rows("", ["64x64x5"], CPU, options, {}))
    assert [(row["name"], row["gpus"]) for row in rows] == [
        (f"{part}: {side}", 2) for part in ("on, new seed", "off") for side in options.setup
    ]
    assert all(row["nodes"]["samplers"] > 0 and "failed" not in row for row in rows), rows
    with everyday.server_files(tmp_path) as base, everyday.serving(base, CPU) as server:
        if "MultiGPU_WorkUnits" not in server.kinds:
            pytest.skip("this ComfyUI has no MultiGPU CFG Split")
        write_files(base / "models", CPU, "i2v", 2)
        side = next(side for side in SEVERAL if side.name == "native, comfy kitchen attention, 2 GPUs")
        graph = side.graph(Job(width=64, height=64, frames=5, four_steps=False, layers=2))
        server.comfyui.watch(with_defaults(small_graph(graph), server.kinds))  # raises `Refused` where it is no graph

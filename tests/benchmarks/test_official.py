"""Templates with our sampler: the graph that takes the place of ComfyUI's samplers, and which sides a machine runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.templates.our_sampler import with_our_sampler
from benchmarks.templates.run import observed, sampled_with

SCHEMAS = json.loads((Path(__file__).parents[1] / "nodes" / "node_schemas.json").read_text(encoding="utf-8"))
GIVEN = {"positive": ["p", 0], "negative": ["p", 1], "latent_image": ["p", 2], "model": ["shift", 0], "cfg": 1}
GRAPH: dict[str, dict[str, Any]] = {
    "shift": {"class_type": "ModelSamplingSD3", "inputs": {}},
    "p": {"class_type": "WanVaceToVideo", "inputs": {"width": 64, "height": 64, "length": 9}},
    "chosen": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": "lcm"}},
    "scheduler": {"class_type": "BasicScheduler", "inputs": {"steps": 6}},
    "custom": {
        "class_type": "SamplerCustom",
        "inputs": {**GIVEN, "noise_seed": 7, "sampler": ["chosen", 0], "sigmas": ["scheduler", 0]},
    },
    "k": {
        "class_type": "KSampler",
        "inputs": {**GIVEN, "seed": 8, "sampler_name": "uni_pc", "scheduler": "simple", "steps": 4, "denoise": 1},
    },
}


def test_our_sampler_gets_the_seed_the_solver_and_the_sigmas_of_the_one_that_it_replaces() -> None:
    graph = with_our_sampler(GRAPH, {"precision": "fp8"}, "2")
    custom, k = graph["custom"]["inputs"], graph["k"]["inputs"]
    assert (custom["seed"], custom["solver"], custom["sigmas"]) == (7, "lcm", ["scheduler", 0])
    assert (k["seed"], k["solver"], k["sigmas"]) == (8, "unipc", ["loaders.sigmas k", 0])
    assert graph["loaders.sigmas k"]["inputs"] == {
        "model": ["shift", 0],
        "scheduler": "simple",
        "steps": 4,
        "denoise": 1,
    }
    for name in ("custom", "k"):
        link = graph[f"loaders.{name}"]["inputs"]
        assert link == {"model": ["shift", 0], "precision": "fp8", "attention": "auto", "residency": "auto",
                        "workers": ["loaders.workers", 0]}  # fmt: skip
        assert graph[name]["inputs"]["guidance_high"] == 1
    for one in graph.values():
        if one["class_type"] in SCHEMAS:
            assert one["inputs"].keys() <= {item["name"] for item in SCHEMAS[one["class_type"]]["inputs"]}
    for one in observed(graph, "timed").values():
        assert all(value[0] in graph for value in one["inputs"].values() if isinstance(value, list))


def test_steps_seeds_and_solvers_of_all_samplers_change() -> None:
    graph = sampled_with(GRAPH, steps=2, solver="euler", seed=5)
    assert graph["custom"]["inputs"]["noise_seed"] == graph["k"]["inputs"]["seed"] == 5
    assert graph["scheduler"]["inputs"]["steps"] == graph["k"]["inputs"]["steps"] == 2
    assert graph["chosen"]["inputs"]["sampler_name"] == graph["k"]["inputs"]["sampler_name"] == "euler"

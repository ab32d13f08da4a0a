"""ComfyUI's official Wan templates with WanCore Accelerate in front of every sampler, on tiny random weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.comfy_graphs import with_defaults
from benchmarks.comfyui import Graph
from benchmarks.templates.expand import expand
from benchmarks.templates.our_sampler import with_our_sampler
from benchmarks.templates.run import TEMPLATES, Templates, observed, sampled_with
from tests.comfyui import find_newer_comfyui

RESULTS = Path(__file__).parent / "template_results.json"
EXPECTED = {one["template"]: one for one in json.loads(RESULTS.read_text(encoding="utf-8"))["templates"]}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Templates]:
    checkout = find_newer_comfyui()
    try:
        # On a CPU ComfyUI computes attention in parts, which rounds otherwise (1.03e-5 in Animate-2).
        arguments = ["--use-pytorch-cross-attention"]
        server = Templates(checkout, tmp_path_factory.mktemp("comfyui"), arguments=arguments)
    except FileNotFoundError as fault:
        pytest.skip(str(fault))
    yield server
    server.stop()


def latents(templates: Templates, graph: Graph, run: str, accelerate: Mapping[str, Any] | None = None) -> list[Any]:
    """Those of every sampler."""
    done = templates.server.run(observed(graph, run, accelerate))
    assert done.ok, f"{run}: {done.status}"
    tensors = [*templates.kept(run).values()]
    assert all(one.isfinite().all() and one.abs().max() > 0 for one in tensors), "the latents are not those of a model"
    return tensors


def error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest of all samplers."""
    pairs = zip(actual, expected, strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


@pytest.mark.comfy
@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_samples_the_same_and_says_what_was_accelerated(templates: Templates, name: str) -> None:
    graph, begin, expected = templates.graph(name), len(templates.server.log()), EXPECTED[name]
    plain = latents(templates, graph, "plain")
    assert error(latents(templates, graph, "fast", {"speed": "exact", "attention": "auto"}), plain) <= 1e-5
    assert len(plain) == expected["samplers"]
    assert re.findall(r"WanCore Accelerate: (.*)", templates.server.log()[begin:]) == expected["words"]
    # Our sampler does not replace two samplers of one video. Where its error is above 1e-3, docs/families.md says what
    # is done differently from ComfyUI, and why.
    alone = all(one["class_type"] != "KSamplerAdvanced" for one in graph.values())
    assert alone == (expected["ours"] is not None)
    if alone:
        euler = sampled_with(graph, solver="euler")  # other solvers draw noise of their own
        ours = latents(templates, with_defaults(with_our_sampler(euler), templates.info), "ours")
        assert error(ours, latents(templates, euler, "euler")) <= 2.5 * expected["ours"] + 1e-5


# ------------------------------------------------------------------------------------------------ without ComfyUI

INFO: dict[str, Any] = {
    "Loader": {"input": {"required": {"name": [["a", "b"]]}}},
    "Sampler": {"input": {"required": {
        "model": ["MODEL"], "seed": ["INT", {"control_after_generate": True}], "steps": ["INT", {}],
        "size": ["COMFY_DYNAMICCOMBO_V3", {"options": [
            {"key": "by hand", "inputs": {"required": {"width": ["INT", {}]}}}, {"key": "own", "inputs": {}},
        ]}],
        "cfg": ["FLOAT", {"default": 1.5}],
    }}},
    "Switch": {"input": {"required": {"model": ["MODEL"]}}},
    "Save": {"input": {"required": {"latent": ["LATENT"]}}},
}  # fmt: skip


def page_node(number: int, kind: str, links: dict[str, int], values: list[Any], **more: Any) -> dict[str, Any]:
    inputs = [{"name": name, "type": "MODEL", "link": link, **more.get(name, {})} for name, link in links.items()]
    outputs = [{"type": "MODEL"}]
    return {"id": number, "type": kind, "inputs": inputs, "outputs": outputs, "widgets_values": values,
            "mode": more.get("mode", 0)}  # fmt: skip


def inner(number: int, origin: int, slot: int, target: int, at: int) -> dict[str, int]:
    names = ("id", "origin_id", "origin_slot", "target_id", "target_slot")
    return dict(zip(names, (number, origin, slot, target, at), strict=True))


def nested() -> dict[str, Any]:
    """A loader, a bypassed switch, a subgraph with a sampler whose steps are a widget of the subgraph, and a save."""
    sampler = page_node(5, "Sampler", {"model": 1, "steps": 2}, [7, "randomize", 20, "by hand", 64],
                        steps={"widget": {"name": "steps"}})  # fmt: skip
    subgraph = {
        "id": "sub", "name": "sub", "nodes": [sampler],
        "inputs": [{"name": "model", "linkIds": [1]}, {"name": "steps", "linkIds": [2]}],
        "outputs": [{"name": "latent", "linkIds": [3]}],
        "links": [inner(1, -10, 0, 5, 0), inner(2, -10, 1, 5, 1), inner(3, 5, 0, -20, 0)],
    }  # fmt: skip
    nodes = [
        page_node(1, "Loader", {}, ["b"]),
        page_node(2, "Switch", {"model": 1}, [], mode=4),
        page_node(3, "sub", {"model": 2}, [4]),
        page_node(4, "Save", {"latent": 3}, []),
        page_node(9, "Note", {}, ["words"]),
    ]
    links = [[1, 1, 0, 2, 0, "MODEL"], [2, 2, 0, 3, 0, "MODEL"], [3, 3, 0, 4, 0, "LATENT"]]
    return {"nodes": nodes, "links": links, "definitions": {"subgraphs": [subgraph]}}


def test_subgraphs_and_bypassed_nodes_are_expanded() -> None:
    graph = expand(nested(), INFO)
    assert graph.keys() == {"1", "3:5", "4"}
    assert graph["1"]["inputs"] == {"name": "b"}
    expected = {"model": ["1", 0], "seed": 7, "steps": 4, "size": "by hand", "size.width": 64, "cfg": 1.5}
    assert graph["3:5"]["inputs"] == expected
    assert graph["4"]["inputs"] == {"latent": ["3:5", 0]}
    old = nested()
    old["nodes"][2]["widgets_values"] = []  # the older form shows the inner node's value
    assert expand(old, INFO)["3:5"]["inputs"]["steps"] == 20

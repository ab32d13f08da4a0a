"""WanCore Launcher with a cluster under a running ComfyUI: a video, an interruption, a killed node, a second graph, a
lost head."""

from __future__ import annotations

import os
import site
from collections.abc import Iterator

import pytest

from tests.cluster.conftest import Nodes
from tests.comfyui import ComfyUI, Graph, act_in_step, find_comfyui, interrupted, make_base
from tools.embedded_graphs import node, small, text_to_video

pytestmark = [pytest.mark.ray, pytest.mark.comfy, pytest.mark.slow]


@pytest.fixture(scope="module")
def mortal(nodes: Nodes) -> Iterator[Nodes]:
    """A second cluster, which a test may end."""
    cluster_nodes = Nodes(nodes.temporary)
    yield cluster_nodes
    cluster_nodes.cluster.shutdown()


@pytest.fixture(scope="module")
def comfy(nodes: Nodes, mortal: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """It finds Ray where the tests have it."""
    paths = [*site.getsitepackages(), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"WANCORE_CLUSTERS": f"{nodes.address},{mortal.address}", "PYTHONPATH": os.pathsep.join(paths)}
    server = ComfyUI(find_comfyui(), make_base(tmp_path_factory.mktemp("comfyui")), environment)
    yield server
    server.stop()


def on_cluster(graph: Graph, nodes: Nodes, **changed: object) -> Graph:
    launcher = {"devices": "cpu,cpu", "mesh": "1x1x2", "start_timeout": 120, "step_timeout": 60}
    graph["launcher"] = node("WanCoreLauncher", **launcher, **{"cluster": nodes.address, **changed})
    for loader in ("model", "encoder", "vae"):
        graph[loader]["inputs"]["workers"] = ["launcher", 0]
    return graph


def test_a_graph_an_interruption_and_a_killed_node(comfy: ComfyUI, nodes: Nodes) -> None:
    nodes.have(3)
    run = comfy.watch(on_cluster(small(), nodes))
    assert run.ok, run.status
    assert sum(event["type"] == "preview" for event in run.events) > 0
    interrupted(comfy, on_cluster(small(steps=1000, seed=77, solver="euler"), nodes))
    assert comfy.run(on_cluster(small(seed=78), nodes)).ok
    before = {one.node_id for one in nodes.cpus}
    graph = on_cluster(small(steps=1000, seed=79, solver="euler"), nodes)
    run, _ = act_in_step(comfy, graph, lambda: nodes.kill(nodes.busy()[0]))
    message = run.message("execution_error")["exception_message"]
    [lost] = before - {one.node_id for one in nodes.cpus}
    assert "the cluster lost" in message and f"node {lost[:6]}" in message and "of 1000" in message
    assert comfy.run(on_cluster(small(seed=80), nodes)).ok


def test_a_lost_head(comfy: ComfyUI, nodes: Nodes, mortal: Nodes) -> None:
    """ComfyUI outlives it: the graph ends with an error after a minute, and others run here and on another cluster."""
    mortal.have(2)
    graph = on_cluster(text_to_video(steps=1000, seed=81, solver="euler"), mortal)
    run, _ = act_in_step(comfy, graph, mortal.kill_head)
    assert "of 1000" in run.message("execution_error")["exception_message"]
    again = comfy.run(on_cluster(small(seed=82), mortal))
    assert "cannot connect to the Ray cluster" in again.message("execution_error")["exception_message"]
    assert comfy.run(small(seed=83)).ok
    nodes.have(2)
    assert comfy.run(on_cluster(small(seed=84), nodes)).ok

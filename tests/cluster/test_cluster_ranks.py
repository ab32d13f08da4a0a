"""One video on several nodes of a Ray cluster: the result of one rank, a node that is lost, files that are missing."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Nodes
from wan_core.cluster.ranks import cluster_workers
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.run import Watch
from wan_core.workers.client import WorkerEngine
from wan_core.workers.launcher import WorkerError

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SMALL = {"prompt": "a red circle moving right on a blue background", "width": 64, "height": 64, "frames": 5, "steps": 2}
TINY = LoadOptions(model="tiny", device="cpu")


@pytest.mark.parametrize(("mesh", "cpus"), [("2x1x1", 1), ("1x1x2", 1), ("2x1x2", 2)])
def test_the_result_of_one_rank(mesh: str, cpus: int, nodes: Nodes, tmp_path: Path) -> None:
    """On two nodes; the finished latents come to this machine, too."""
    nodes.have(2, cpus)
    alone = Pipeline.load(TINY).generate(Request(**SMALL))
    gpus = ",".join(["cpu"] * 2 * cpus)
    with cluster_workers(nodes.address, gpus, mesh=mesh) as workers:
        kept_files: list[Path] = []
        watch = Watch(kept=kept_files.append, keep_latents=tmp_path / "x.safetensors")
        result = WorkerEngine(workers).generate(TINY, Request(**SMALL), watch)
    assert (result.latents - alone.latents).abs().max() <= 1e-5 * alone.latents.abs().max()
    assert result.report.settings["mesh"] == mesh
    assert kept_files == [tmp_path / "x.safetensors"] and kept_files[0].stat().st_size > 0


def test_a_node_is_killed(nodes: Nodes) -> None:
    """The error names the node and the last step, in seconds; the next request runs where there is room."""
    nodes.have(3)
    begun, faults = threading.Event(), []

    def step(progress: Any, seconds: Any) -> None:
        if progress.step.index == 3:
            begun.set()

    with cluster_workers(nodes.address, "cpu,cpu", mesh="1x1x2") as workers:

        def generate() -> None:
            try:
                WorkerEngine(workers).generate(TINY, Request(**SMALL | {"steps": 1000}), Watch(step=step))
            except WorkerError as fault:
                faults.append(str(fault))

        thread = threading.Thread(target=generate)
        thread.start()
        assert begun.wait(120)
        lost = nodes.busy()[1]
        begin = time.monotonic()
        nodes.kill(lost)
        thread.join()
        seconds = time.monotonic() - begin
        result = WorkerEngine(workers).generate(TINY, Request(**SMALL))
    assert re.search(rf"the cluster lost \S+ \(\S+, node {lost[:6]}\)", faults[0]), faults
    assert re.search(r"step \d+ of 1000", faults[0]), faults
    assert result.frames.shape[0] == 5
    print(f"a lost node was named after {seconds:.1f} s")
    assert seconds < 30


def test_a_file_that_a_node_lacks(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Named with its node, before anything is loaded; the folder of the models may differ there."""
    nodes.have(2)
    monkeypatch.setenv("WANCORE_CLUSTER_MODELS", f"{tmp_path}=/nowhere")
    options = LoadOptions(model="tiny", device="cpu", vae=str(tmp_path / "vae.safetensors"))
    with (
        cluster_workers(nodes.address, "cpu,cpu", mesh="1x1x2") as workers,
        pytest.raises(OptionError, match=r"node \w+\) lacks /nowhere/vae.safetensors"),
    ):
        WorkerEngine(workers).generate(options, Request(**SMALL))


def test_more_than_the_nodes_have(nodes: Nodes) -> None:
    nodes.have(1)
    with pytest.raises(OptionError, match=r"3 CPUs asked for, the same number on each node, .* has: .*: 1"):
        cluster_workers(nodes.address, "cpu,cpu,cpu", mesh="auto")

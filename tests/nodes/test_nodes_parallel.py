"""Workers under a running ComfyUI: two ranks on the CPU, driven through its API, and what becomes of the processes."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from tests.comfyui import ComfyUI, Graph, Refused, act_in_step, find_comfyui, interrupted, make_base
from tests.nodes.test_workflows import caption_behind, on_cpu_workers
from tests.nodes.workflow_pages import api_form
from tools.embedded_graphs import node, small, text_to_video
from tools.processes import below, ranks_below, wait_until_gone
from wan_core.media.video import read_video
from wan_lab.metrics import judge

pytestmark = pytest.mark.comfy

LAUNCHER = {"devices": "cpu,cpu", "mesh": "auto", "start_timeout": 60, "step_timeout": 60}


def on_workers(graph: Graph, **changed: object) -> Graph:
    graph["launcher"] = node("WanCoreLauncher", **{**LAUNCHER, **changed})
    for loader in ("model", "encoder", "vae"):
        graph[loader]["inputs"]["workers"] = ["launcher", 0]
    return graph


def test_the_workflow_runs_twice_on_the_same_workers(comfy: ComfyUI) -> None:
    """It makes the video that the prompt asks for; the second run finds the workers of the first."""
    workers = []
    for seed in (2, 3):
        prompt = on_cpu_workers(api_form("multi_gpu"))
        [sampler] = [key for key, entry in prompt.items() if entry["class_type"] == "WanCoreSampler"]
        [saved] = [key for key, entry in prompt.items() if entry["class_type"] == "SaveVideo"]
        [report] = [key for key, entry in prompt.items() if entry["class_type"] == "WanCoreReport"]
        prompt[sampler]["inputs"]["seed"] = seed
        prompt["words"] = node("PreviewAny", source=[report, 1])
        run = comfy.watch(prompt)
        assert run.ok, run.status
        verdict = judge(torch.from_numpy(read_video(comfy.output_file(run, saved))), caption_behind(prompt, saved))
        assert verdict.all_true, verdict
        steps = [e["data"]["value"] for e in run.events if e["type"] == "progress" and e["data"]["node"] == sampler]
        assert steps == list(range(1, 21))
        assert sum(e["type"] == "preview" for e in run.events) == 20
        report_text = run.outputs["words"]["text"][0]
        assert all(word in report_text for word in ("denoise high", "decode", "mesh: 2x1x1"))
        assert "guidance: parallel (each branch has ranks of its own)" in report_text and "batched" not in report_text
        workers.append(ranks_below(comfy.process.pid))
    assert len(workers[0]) == 2 and workers[0] == workers[1]
    assert not list(comfy.base.rglob("unfinished-*"))


def pictures(comfy: ComfyUI, graph: Graph) -> np.ndarray:
    graph["save"] = node("SaveImage", images=["decode", 0], filename_prefix="workers")
    run = comfy.run(graph)
    assert run.ok, run.status
    return np.stack([np.asarray(Image.open(comfy.output_file(run, "save", i)), dtype=int) for i in range(5)])


@pytest.mark.parametrize("mesh", ["auto", "1x1x2"])
def test_the_same_pictures_as_without_workers(comfy: ComfyUI, mesh: str) -> None:
    alone, together = pictures(comfy, small(steps=4)), pictures(comfy, on_workers(small(steps=4), mesh=mesh))
    assert np.abs(alone - together).max() <= 1 and alone.std() > 0


def test_steps_at_the_same_time_of_which_the_first_worker_runs_no_low_noise_one(comfy: ComfyUI) -> None:
    """This happens with `time4` and the released models: rank 0's report lacks that expert."""
    steps = {"steps": 20, "solver": "euler", "shift": 12.0, "boundary": 0.6}
    run = comfy.run(on_workers(small(**steps), mesh="time2"))
    assert run.ok, run.status


def test_interruption_leaves_the_workers_alive_and_the_next_prompt_uses_them(comfy: ComfyUI) -> None:
    assert comfy.run(on_workers(small())).ok
    workers = ranks_below(comfy.process.pid)
    reached = interrupted(comfy, on_workers(text_to_video(steps=1000, seed=77, solver="euler")))
    assert reached < 300  # of 1000: those that ran while the request was on its way
    assert comfy.run(on_workers(small(seed=78))).ok
    assert ranks_below(comfy.process.pid) == workers


def test_a_killed_worker_is_named_and_the_next_prompt_starts_anew(comfy: ComfyUI) -> None:
    assert comfy.run(on_workers(small())).ok
    workers = ranks_below(comfy.process.pid)
    graph = on_workers(small(steps=1000, seed=79, solver="euler"))
    run, _ = act_in_step(comfy, graph, lambda: os.kill(workers[1], signal.SIGKILL))
    error = run.message("execution_error")
    assert error["node_id"] == "sampler" and "SIGKILL" in error["exception_message"]
    assert f"rank 1 on {os.uname().nodename} (process {workers[1]}, cpu)" in error["exception_message"]
    wait_until_gone(workers)
    assert comfy.run(on_workers(small(seed=80))).ok


def test_free_ends_the_workers_and_they_come_back(comfy: ComfyUI) -> None:
    assert comfy.run(on_workers(small(seed=81))).ok
    processes = below(comfy.process.pid)
    assert len(processes) >= 3
    comfy.post("/free", {"unload_models": True})
    wait_until_gone(processes, 20)
    assert comfy.run(on_workers(small(seed=82))).ok


def test_a_graph_without_the_node_ends_the_workers(comfy: ComfyUI) -> None:
    assert comfy.run(on_workers(small(seed=83))).ok
    processes = below(comfy.process.pid)
    assert len(processes) >= 3
    assert comfy.run(small(seed=83)).ok
    wait_until_gone(processes, 20)


def test_a_launcher_that_was_changed_ends_the_workers_before(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also where ComfyUI keeps the results of earlier graphs, as it does by default while host memory is free."""
    base = make_base(tmp_path_factory.mktemp("kept"))
    server = ComfyUI(find_comfyui(), base, arguments=["--cache-lru", "100"])
    try:
        for seed, mesh in enumerate(("2x1x1", "1x1x2", "2x1x1"), start=90):
            assert server.run(on_workers(small(seed=seed), mesh=mesh)).ok
            assert len(ranks_below(server.process.pid)) == 2
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"devices": "cpu,gpu"}, "'gpu' is not known"),
        ({"devices": "cuda:90"}, "finds"),
        ({"devices": "cpu" + ",cpu" * 99_999}, "100000 workers on the CPU given"),
        ({"mesh": "2x2x2"}, "needs 8 ranks"),
        ({"mesh": "fast"}, "CFGxRINGxULYSSES"),
        ({"step_timeout": 0}, "5 to 86400"),
    ],
)
def test_bad_input_is_refused_at_the_launcher(comfy: ComfyUI, changed: dict[str, object], message: str) -> None:
    with pytest.raises(Refused) as refused:
        comfy.queue(on_workers(small(), **changed))
    assert set(refused.value.errors) == {"launcher"}
    assert message in json.dumps(refused.value.errors["launcher"]["errors"])
    assert len(refused.value.errors["launcher"]["errors"]) == 1


def test_workers_die_with_a_comfyui_that_is_killed(tmp_path_factory: pytest.TempPathFactory, comfy: ComfyUI) -> None:
    """And those of another ComfyUI on this host live on."""
    other = ComfyUI(find_comfyui(), make_base(tmp_path_factory.mktemp("other")))
    try:
        assert comfy.run(on_workers(small(seed=84))).ok
        mine = below(comfy.process.pid)
        assert other.run(on_workers(small(seed=84))).ok
        processes = below(other.process.pid)
        assert len(processes) >= 3
        other.process.kill()
        wait_until_gone(processes)
        assert below(comfy.process.pid) == mine
        assert comfy.run(on_workers(small(seed=85))).ok
    finally:
        other.stop()

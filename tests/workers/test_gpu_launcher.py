"""Workers on several NVIDIA GPUs: the result of one GPU, errors that are reported, and memory that is freed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
import torch

from tools.processes import below, open_no_more_files, ranks_below, wait_until, wait_until_gone
from wan_core.config import LoadOptions, Request
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.run import Watch
from wan_core.sampling.denoise import Progress
from wan_core.workers.client import WorkerEngine
from wan_core.workers.launcher import WorkerError, Workers
from wan_core.workers.options import WorkerOptions, parse_devices

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs or more, {GPUS} are there"),
]
PROMPT = "a red circle moving right on a blue background"
TINY = LoadOptions(model="tiny", precision="fp32", vae_precision="fp32", attention="sdpa")
MESHES = ["2x1x1", "1x1x2", "1x2x1"] if GPUS < 4 else ["2x1x2", "1x1x4", "1x2x2"]


def workers(mesh: str, **options: float) -> Workers:
    count = 2 if GPUS < 4 else 4
    return Workers(WorkerOptions(devices=parse_devices(str(count), GPUS), mesh=mesh, start_timeout=120, **options))


def free_bytes() -> list[int]:
    return [torch.cuda.mem_get_info(i)[0] for i in range(GPUS)]


def test_every_mesh_gives_the_result_of_one_gpu_and_frees_its_memory() -> None:
    request = Request(prompt=PROMPT, seed=3, steps=4)
    alone = Pipeline.load(TINY).generate(request)
    before = free_bytes()
    for mesh in MESHES:
        with workers(mesh) as running:
            result = WorkerEngine(running).generate(TINY, request)
            again = WorkerEngine(running).generate(TINY, request)
            assert max(a - b for a, b in zip(before, free_bytes(), strict=True)) > 2**28  # a context at least
        assert torch.equal(result.latents, again.latents)
        relative = (result.latents - alone.latents).norm() / alone.latents.norm()
        assert relative < 1e-3, (mesh, float(relative))
        assert result.report.as_dict()["peak_device_gib"] > 0
    wait_until(lambda: all(a - b < 2**27 for a, b in zip(before, free_bytes(), strict=True)), 20, "memory is held")


def test_a_killed_rank_is_named_and_the_next_prompt_works() -> None:
    others = set(below(os.getpid()))  # compilers of tests before this one in the same process
    with workers(MESHES[1]) as running:
        WorkerEngine(running).generate(TINY, Request(prompt=PROMPT, steps=2))
        pids = ranks_below(os.getpid())

        def kill(progress: Progress, seconds: float | None) -> None:
            if progress.step.index == 3:
                os.kill(pids[1], signal.SIGKILL)

        with pytest.raises(WorkerError, match=rf"rank 1 .*process {pids[1]}, cuda:1.* was ended by signal 9"):
            WorkerEngine(running).generate(TINY, Request(prompt=PROMPT, steps=1000, solver="euler"), Watch(step=kill))
        wait_until_gone(pids)
        assert WorkerEngine(running).generate(TINY, Request(prompt=PROMPT, steps=2)).frames.std() > 0
    wait_until_gone(set(below(os.getpid())) - others)


def test_a_rank_that_cannot_open_a_file_ends_all_in_seconds() -> None:
    """The others wait for it in an exchange of NCCL, which does not notice that a peer has ended."""
    with workers(MESHES[1]) as running:
        WorkerEngine(running).generate(TINY, Request(prompt=PROMPT, steps=2))
        pids, begin = ranks_below(os.getpid()), time.monotonic()
        open_no_more_files(pids[-1])
        with pytest.raises(WorkerError, match=rf"process {pids[-1]}, cuda.* refused the request .*cannot be read"):
            WorkerEngine(running).generate(replace(TINY, precision="bf16"), Request(prompt=PROMPT, steps=2))
        assert time.monotonic() - begin < 30
        wait_until_gone(pids)
        assert WorkerEngine(running).generate(TINY, Request(prompt=PROMPT, steps=2)).frames.std() > 0


def test_a_video_too_large_for_every_gpu_is_reported() -> None:
    """The ranks stay alive, or are started again."""
    large = Request(prompt=PROMPT, steps=1, width=8192, height=8192, frames=201)  # 137 GB of tokens before any block
    with workers(MESHES[1]) as running:
        with pytest.raises(WorkerError, match="ran out of memory"):
            WorkerEngine(running).generate(
                LoadOptions(model="random:t2v-A14B", precision="bf16", residency="resident"), large
            )
        assert WorkerEngine(running).generate(TINY, Request(prompt=PROMPT, steps=2)).frames.std() > 0


def test_interruption_and_prompts_of_several_sizes() -> None:
    class Enough(Exception):
        pass

    def enough(progress: Progress, seconds: float | None) -> None:
        if progress.step.index == 5:
            raise Enough

    with workers(MESHES[1]) as running:
        with pytest.raises(Enough):
            WorkerEngine(running).generate(TINY, Request(prompt=PROMPT, steps=1000, solver="euler"), Watch(step=enough))
        for side in (64, 96, 128):
            request = Request(prompt=PROMPT, steps=2, width=side, height=side, frames=9)
            assert WorkerEngine(running).generate(TINY, request).frames.shape == (9, side, side, 3)

"""Workers that are killed, stopped, or run out of memory, files or disk: each fault ends within seconds with a message
that names the rank, no process is left, and the next prompt works. Two real ranks on the CPU, the embedded model, real
limits of the system. The first pair is started as a program starts it; those after a fault are forks (`forked.py`).

Timeouts are short only in the tests about a timeout: a busy machine may pause any process for seconds."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import Forked
from tests.workers.running_workers import LONG, MESH, SMALL, TINY, all_of, ranks, run, short_timeouts, supervisor_of
from tools.processes import below, open_no_more_files, wait_until, wait_until_gone
from wan_core.config import (
    OptionError,
    Request,
    SkipOptions,
    TaylorSeerOptions,
)
from wan_core.pipeline.run import Watch
from wan_core.sampling.denoise import Progress
from wan_core.workers.client import WorkerEngine
from wan_core.workers.launcher import WorkerError, Workers

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and sets limits of other processes"),
    pytest.mark.slow,
]

ROOT = Path(__file__).resolve().parents[2]
SMALL |= {"steps": 2}


def in_a_step(workers: Workers, act: Callable[[], object]) -> Callable[..., None]:
    """Call `act` once, when every rank has reported that it is in a step."""
    done: list[bool] = []

    def on_step(progress: Progress, _: float | None) -> None:
        assert workers._processes is not None
        statuses = workers._processes.statuses
        if not done and len(statuses) == 2 and all(status["of"] == progress.total for status in statuses):
            done.append(True)
            act()

    return on_step


def failure(workers: Workers, **changed: Any) -> str:
    """The message of a request that must fail long before its timeouts, leaving no process."""
    processes, begin = all_of(workers), time.monotonic()
    with pytest.raises(WorkerError) as raised:
        run(workers, **changed)
    assert time.monotonic() - begin < 40
    wait_until_gone(processes)
    return str(raised.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_a_step(workers: Workers, rank: int) -> None:
    pids = ranks(workers)
    message = failure(workers, **LONG, on_step=in_a_step(workers, lambda: os.kill(pids[rank], signal.SIGKILL)))
    assert f"rank {rank} on {socket.gethostname()} (process {pids[rank]}, cpu) was ended by signal 9" in message
    assert "denoise" in message and "of 1000" in message and "again" in message
    assert run(workers).frames.std() > 0 and not set(ranks(workers)) & set(pids)


def test_a_rank_killed_between_prompts_costs_no_prompt(workers: Workers) -> None:
    pids = ranks(workers)
    assert run(workers).frames.std() > 0
    processes = all_of(workers)
    os.kill(pids[1], signal.SIGKILL)
    wait_until_gone(processes)
    wait_until(lambda: not workers.is_running, 20, "the end of the ranks was not noticed")
    assert run(workers).frames.std() > 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stops(workers: Workers, rank: int) -> None:
    """A stopped rank is what a machine that hangs looks like. A stopped process reacts to no signal but SIGKILL."""
    pids = ranks(workers)

    def stop() -> None:
        os.kill(pids[rank], signal.SIGSTOP)
        workers.options = replace(workers.options, heartbeat_timeout=5.0)

    with short_timeouts(workers):  # from then on
        message = failure(workers, **LONG, on_step=in_a_step(workers, stop))
    assert f"rank {rank}" in message and "no heartbeat" in message and "denoise" in message and "of 1000" in message


def test_ranks_that_make_no_progress(workers: Workers) -> None:
    """They send heartbeats, but reach no step: here, one that takes longer than is allowed."""
    ranks(workers)
    with short_timeouts(workers, step_timeout=1.0):
        message = failure(workers, width=448, height=448, frames=81)
    assert "no rank made progress for 1 s" in message and "rank 0: denoise" in message


def limit_memory(pid: int) -> None:
    """16 MB more address space than it has now."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmSize")]
    allowed = int(line.split()[1]) * 1024 + 16 * 2**20
    resource.prlimit(pid, resource.RLIMIT_AS, (allowed, resource.RLIM_INFINITY))


def test_a_rank_that_cannot_open_a_file(workers: Workers) -> None:
    """The other rank waits for it in the first exchange of loading."""
    run(workers)
    pids, begin = ranks(workers), time.monotonic()
    open_no_more_files(pids[1])
    with pytest.raises(WorkerError) as raised:
        WorkerEngine(workers).generate(replace(TINY, precision="bf16"), Request(**SMALL))
    assert time.monotonic() - begin < 20
    message = str(raised.value)
    assert f"rank 1 on {socket.gethostname()} (process {pids[1]}, cpu) refused the request" in message
    assert ".safetensors: cannot be read (Too many open files)" in message
    wait_until_gone(pids)
    assert run(workers).frames.std() > 0


def test_ranks_that_all_run_out_of_memory_go_on_with_the_next_prompt(workers: Workers) -> None:
    """A video too large for every rank does not end them."""
    pids = ranks(workers)
    for pid in pids:
        limit_memory(pid)
    with pytest.raises(WorkerError, match=r"rank 0 .* ran out of memory"):
        run(workers, width=8192, height=8192, frames=81, steps=1)
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert run(workers).frames.std() > 0 and ranks(workers) == pids


class Enough(Exception):
    pass


@pytest.mark.parametrize("kind", [Enough, OptionError])
def test_an_interruption_stops_all_ranks_at_one_step(workers: Workers, kind: type[Exception]) -> None:
    """1000 steps would take longer than the test allows."""
    pids, seen = ranks(workers), []

    def enough(progress: Progress, seconds: float | None) -> None:
        seen.append((progress.step.index, time.monotonic()))
        if progress.step.index == 5:
            raise kind

    with pytest.raises(kind):
        run(workers, **LONG, on_step=enough)
    took = (seen[5][1] - seen[0][1]) / 5
    assert [index for index, _ in seen] == list(range(6))
    assert run(workers).frames.std() > 0 and ranks(workers) == pids
    assert time.monotonic() - seen[5][1] < 20 * took + 4


SPLIT = SkipOptions(taylorseer=TaylorSeerOptions(interval=2))


@pytest.mark.parametrize("mesh", [MESH, "2x1x1"])
def test_an_interruption_between_blocks_leaves_the_ranks_in_step(workers: Workers, mesh: str) -> None:
    """At any time of the run, also where the ranks of the two branches run different numbers of blocks: the next
    request gives the same video bit for bit."""
    pids, asked = ranks(workers), {**SMALL, "steps": 10, "guidance_low": 1.0, "skip": SPLIT}
    with short_timeouts(workers, mesh=mesh):
        exact, begin = run(workers, **asked).latents, time.monotonic()
        assert torch.equal(run(workers, **asked).latents, exact)
        took = time.monotonic() - begin
        for part in (0.0, 0.5):
            end = time.monotonic() + part * took

            def enough(end: float = end) -> None:
                if time.monotonic() > end:
                    raise Enough

            with contextlib.suppress(Enough):
                workers.call("generate", fields_of(asked, mesh), {}, poll=enough, on_event=lambda *_, e=enough: e())
            assert torch.equal(run(workers, **asked).latents, exact)
    assert ranks(workers) == pids


def fields_of(asked: dict[str, Any], mesh: str) -> dict[str, Any]:
    asked = {"models": asdict(TINY), "request": asdict(Request(**asked)), "mesh": mesh}
    return {**asked, "files": [], "keep": None, "must_keep": False, "keep_clips": None}


def test_an_interruption_does_not_wait_for_the_step(workers: Workers) -> None:
    """One step that takes seconds: interrupted as it begins, it ends within half of it, also on a busy machine."""
    asked = {**SMALL, "steps": 2, "width": 288, "height": 288, "frames": 57}
    times: list[float] = []

    def phase(name: str) -> None:
        if name == "denoise":
            times.append(time.monotonic())

    def step(progress: Progress, _: float | None) -> None:
        times.append(time.monotonic())
        raise Enough

    with pytest.raises(Enough):
        WorkerEngine(workers).generate(TINY, Request(**asked), Watch(phase=phase, step=step))
    took = times[1] - times[0]

    def at_once(name: str) -> None:
        if name == "denoise":
            times.append(time.monotonic())
            raise Enough

    with pytest.raises(Enough):
        WorkerEngine(workers).generate(TINY, Request(**asked), Watch(phase=at_once))
    assert time.monotonic() - times[-1] < 0.5 * took, took


def test_the_ranks_end_with_a_killed_supervisor(workers: Workers) -> None:
    pids = ranks(workers)
    supervisor = supervisor_of(workers)
    assert below(os.getpid()) >= {supervisor, *pids}
    message = failure(workers, **LONG, on_step=in_a_step(workers, lambda: os.kill(supervisor, signal.SIGKILL)))
    assert "supervisor of the ranks ended with code -9" in message
    assert run(workers).frames.std() > 0


PROGRAM = """
    from wan_core.config import LoadOptions, Request
    from wan_core.workers.launcher import Workers
    from wan_core.workers.options import WorkerOptions
    from wan_core.workers.client import WorkerEngine
    from wan_core.pipeline.run import Watch

    workers = Workers(WorkerOptions(devices=("cpu", "cpu"), mesh="1x1x2"))
    request = Request(prompt="", steps=1000, solver="euler")
    watch = Watch(step=lambda p, s: print(p.step.index, flush=True))
    WorkerEngine(workers).generate(LoadOptions(model="tiny"), request, watch)
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_a_program_that_is_killed_leaves_nothing(sign: signal.Signals) -> None:
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    program = Forked(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert program.stdout is not None
    assert program.stdout.readline() == "0\n"
    processes = below(program.pid)
    assert len(processes) == 3
    os.kill(program.pid, sign)
    program.wait(40)
    program.stdout.close()
    wait_until_gone(processes)

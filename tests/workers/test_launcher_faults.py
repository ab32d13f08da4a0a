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
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.forked import Forked, forking
from tools.processes import below, memory_of, open_no_more_files, wait_until, wait_until_gone
from wan_core import load_text_encoder, load_vae, make_plan
from wan_core.checkpoint import save
from wan_core.checkpoint.save import load_latents
from wan_core.config import (
    LoadOptions,
    NagOptions,
    OptionError,
    Request,
    SkipOptions,
    TaylorSeerOptions,
)
from wan_core.execution.report import Report
from wan_core.models.text.tokenizer import TokenCount
from wan_core.models.text.umt5 import PromptCache
from wan_core.models.vae.tiling import TileSpec
from wan_core.models.wan.families.wan.inputs import join_image
from wan_core.pipeline.decode import decode_images
from wan_core.pipeline.denoise import sample_latents
from wan_core.pipeline.encode import encode_images
from wan_core.pipeline.pipeline import Pipeline, Result
from wan_core.pipeline.run import Watch
from wan_core.pipeline.sources import TINY as TINY_FILES
from wan_core.pipeline.sources import find_experts
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.control import with_nag
from wan_core.sampling.cutting import cut_plan
from wan_core.sampling.denoise import Progress, Ready
from wan_core.sampling.plan import Plan
from wan_core.sampling.schedules import Window
from wan_core.sampling.start import Leftover, Start
from wan_core.workers import processes as worker_processes
from wan_core.workers.client import WorkerEngine, on_steps
from wan_core.workers.control import Listener, new_key
from wan_core.workers.launcher import WorkerError, Workers
from wan_core.workers.options import WorkerOptions

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and sets limits of other processes"),
    pytest.mark.slow,
]

ROOT = Path(__file__).resolve().parents[2]
TINY = LoadOptions(model="tiny", device="cpu")
SMALL = {"prompt": "a red circle moving right on a blue background", "width": 48, "height": 48, "frames": 5, "seed": 3}
SMALL |= {"steps": 2}
LEAST = {**SMALL, "width": 32, "height": 32, "steps": 1}
LONG = {**SMALL, "steps": 1000, "solver": "euler", "width": 96, "height": 96, "frames": 17}  # half a minute at least
MESH = "1x1x2"  # every forward needs both ranks
TIMEOUTS: dict[str, Any] = {"start_timeout": 120.0, "step_timeout": 120.0, "heartbeat_timeout": 60.0}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One pair for all tests. If a test ended it, the first request of the next one starts it again."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))  # freed memory goes back to the system
    with Workers(WorkerOptions(devices=("cpu", "cpu"), mesh=MESH, **TIMEOUTS)) as started:
        assert run(started).frames.shape == (5, 48, 48, 3)
        with forking():
            yield started
        processes = all_of(started) if started.is_running else set()
    wait_until_gone(processes)


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """The latents of SMALL from one process."""
    return Pipeline.load(TINY).generate(Request(**SMALL)).latents


def run(workers: Workers, **changed: Any) -> Result:
    keep = changed.pop("keep_latents", None)
    on_step: Callable[..., None] | None = changed.pop("on_step", None)
    return WorkerEngine(workers).generate(TINY, Request(**{**SMALL, **changed}), Watch(step=on_step), keep_latents=keep)


def ranks(workers: Workers) -> list[int]:
    """Process ids by rank. Starts the workers if none run."""
    if not workers.is_running:
        run(workers)
    pids = sorted(all_of(workers) - {supervisor_of(workers)})
    assert len(pids) == 2
    return pids


def supervisor_of(workers: Workers) -> int:
    assert workers._processes is not None
    return workers._processes.process.pid


def all_of(workers: Workers) -> set[int]:
    """Process ids of ranks and supervisor."""
    return below(supervisor_of(workers)) | {supervisor_of(workers)}


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


@contextlib.contextmanager
def short_timeouts(workers: Workers, **limits: float) -> Iterator[None]:
    """With other timeouts."""
    original = workers.options
    workers.options = replace(original, **limits)  # pyright: ignore[reportArgumentType]
    yield
    workers.options = original


def failure(workers: Workers, **changed: Any) -> str:
    """The message of a request that must fail long before its timeouts, leaving no process."""
    processes, begin = all_of(workers), time.monotonic()
    with pytest.raises(WorkerError) as raised:
        run(workers, **changed)
    assert time.monotonic() - begin < 40
    wait_until_gone(processes)
    return str(raised.value)


def test_the_same_result_as_one_process_and_many_prompts_take_no_more_memory(
    workers: Workers, alone: torch.Tensor
) -> None:
    for prompt in range(18):
        run(workers, **LEAST)
        if prompt == 7:
            before = [memory_of(pid) for pid in ranks(workers)]
    grown = [memory_of(pid) - bytes_before for pid, bytes_before in zip(ranks(workers), before, strict=True)]
    assert max(grown) < 5 * 2**20, grown
    assert (run(workers).latents - alone).abs().max() < 1e-4


CPU = torch.device("cpu")


def test_the_parts_that_a_graph_asks_for_are_those_of_one_process(workers: Workers) -> None:
    """Text, an image encoded, sampling from image channels, decoding whole and in tiles."""
    spec = {"path": str(TINY_FILES / "vae.safetensors"), "precision": "auto"}
    vae, report = load_vae(TINY_FILES / "vae.safetensors", dtype=torch.float32), Report(CPU)
    images = torch.rand(5, 48, 64, 3, generator=torch.Generator().manual_seed(1))
    latents = encode_images(vae, images)
    engine = WorkerEngine(workers)
    assert (engine.ask(Tensor, "encode", spec, images=images) - latents).abs().max() < 1e-4
    for tile in (None, TileSpec(height=4, width=4, overlap=2)):
        seen, pieces = list[int](), list[Tensor]()

        def piece(first: int, images: Tensor, pieces: list[Tensor] = pieces) -> None:
            pieces.append(images)

        events = {"piece": piece, "frames": lambda done, total, seen=seen: seen.append(done)}
        engine.ask(None, "decode", spec, report, events, latents=latents, uint8=False, tile=tile)
        assert (torch.cat(pieces) - decode_images(vae, latents, Report(CPU), tile=tile)).abs().max() < 1e-4
        assert seen == sorted(seen) and seen[-1] == 5

    prompts = [SMALL["prompt"], "", "a green square"]
    encoder = load_text_encoder(TINY_FILES / "text_encoder.safetensors", dtype=torch.float32)
    text = {"path": str(TINY_FILES / "text_encoder.safetensors"), "precision": "fp32"}
    cache = PromptCache()
    rows, counts = engine.ask(tuple[Tensor, tuple[TokenCount, ...]], "text", text, prompts=prompts)
    for row, count, expected_row in zip(rows, counts, cache.encode(prompts, encoder.read), strict=True):
        torch.testing.assert_close(row[None, : count.read], expected_row, atol=1e-5, rtol=0)

    high, low = (str(TINY_FILES / f"i2v_{name}.safetensors") for name in ("high", "low"))
    found_experts, plan = find_experts(high, low), make_plan(task="i2v-tiny", steps=4, guidance_high=1.0)
    plan = with_nag(plan, NagOptions())  # where the high-noise expert has no guidance
    cond, uncond = cache.encode(prompts[:2], encoder.read)
    concat = join_image(latents, torch.ones_like(latents[:, :1]), found_experts.vae)
    tensors = {"cond": cond, "uncond": uncond, "concat": concat}
    experts = {
        "high": found_experts.high.load(CPU, torch.float32, None),
        "low": found_experts.low.load(CPU, torch.float32, None),
    }
    noise = draw_noise(7, tuple(latents.shape))
    alone = sample_latents(
        plan, Ready(experts.__getitem__), Conditioning(**tensors), noise, found_experts.vae, Report(CPU)
    )
    model = LoadOptions(high=high, low=low, precision="fp32")
    steps: list[tuple[int, tuple[int, ...]]] = []
    start = Start(shape=tuple(latents.shape), seed=7)
    step = on_steps([plan], lambda done, _: steps.append((done.step.index, tuple(done.preview().shape))))
    together, _ = sampled(engine, model, plan, tensors, start, report, {"step": step})
    assert (together - alone).abs().max() < 1e-4
    assert steps == [(i, (1, 16, 2, 6, 8)) for i in range(4)]
    halves = [cut_plan(replace(plan, window=Window(start=s, end=e, leftover=True))) for s, e in ((0, 2), (2, 4))]
    made, leftover = sampled(engine, model, halves[0], tensors, start, Report(CPU))
    start = replace(start, add_noise=False, latents=made, leftover=leftover)
    made, end = sampled(engine, model, halves[1], tensors, start, Report(CPU))
    assert leftover and end is None and (made - together).abs().max() < 1e-5, (
        "two runs in a row, their state sent back and on"
    )
    assert report.phases["denoise high"].steps + report.phases["denoise low"].steps == 4
    assert report.settings["mesh"] == MESH


def sampled(
    engine: WorkerEngine,
    models: LoadOptions,
    plan: Plan,
    conditioning: dict[str, Tensor],
    start: Start,
    report: Report,
    events: dict[str, Any] | None = None,
) -> tuple[Tensor, Leftover | None]:
    plan = replace(plan, latent_shape=start.shape)
    asked = {"plan": plan, "conditioning": conditioning, "start": start, "fps": 8}
    return engine.sample(models, report, events or {}, keep=None, **asked)


def test_every_second_of_a_request_is_in_a_phase(workers: Workers) -> None:
    """The phases add up to what the program waits, also where ranks have to start first."""
    workers.stop()
    high, low = (str(TINY_FILES / f"t2v_{name}.safetensors") for name in ("high", "low"))
    model = LoadOptions(high=high, low=low, precision="fp32")
    plan, start = make_plan(task="t2v-tiny", steps=2, guidance_high=1.0), Start(shape=(1, 16, 2, 6, 8), seed=7)
    rows = dict.fromkeys(("cond", "uncond"), torch.zeros(1, 8, 64))
    engine, vae = WorkerEngine(workers), {"path": str(TINY_FILES / "vae.safetensors"), "precision": "fp32"}
    for started in (True, False):
        report, begin = Report(CPU), time.perf_counter()
        latents, _ = sampled(engine, model, plan, rows, start, report)
        engine.ask(None, "decode", vae, report, latents=latents, uint8=True, tile=None)
        seconds = time.perf_counter() - begin
        assert report.total_seconds == pytest.approx(seconds, abs=0.02), report.text()
        assert ("start workers" in report.phases) == started
        own = {"check files", "load", "prepare", "denoise high", "save latents", "to and from workers", "decode"}
        assert own <= report.phases.keys()
    begin = time.perf_counter()
    made = run(workers)
    assert made.report.total_seconds == pytest.approx(time.perf_counter() - begin, abs=0.02), made.report.text()


def test_a_file_that_was_replaced_is_read_again(workers: Workers, tmp_path: Path) -> None:
    """Under its old name, of the same size: what the workers hold is no longer what is asked for."""
    path = tmp_path / "vae.safetensors"
    images = torch.rand(5, 48, 64, 3, generator=torch.Generator().manual_seed(1))
    for factor in (1.0, 1.5):
        vae = load_vae(TINY_FILES / "vae.safetensors", dtype=torch.float32)
        with torch.no_grad():
            next(vae.parameters()).mul_(factor)
        save(vae, path)
        latents = WorkerEngine(workers).ask(Tensor, "encode", {"path": str(path), "precision": "auto"}, images=images)
        assert (latents - encode_images(vae, images)).abs().max() < 1e-4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_a_step(workers: Workers, rank: int) -> None:
    pids = ranks(workers)
    message = failure(workers, **LONG, on_step=in_a_step(workers, lambda: os.kill(pids[rank], signal.SIGKILL)))
    assert f"rank {rank} on {socket.gethostname()} (process {pids[rank]}, cpu) was ended by signal 9" in message
    assert "denoise" in message and "of 1000" in message and "again" in message
    assert run(workers).frames.std() > 0 and not set(ranks(workers)) & set(pids)


def test_a_rank_killed_between_prompts_costs_no_prompt(workers: Workers) -> None:
    pids = ranks(workers)
    assert workers.call("ping")[0]["kind"] == "pong"
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


def test_a_rank_that_runs_out_of_memory(workers: Workers) -> None:
    pids = ranks(workers)
    limit_memory(pids[1])
    # The noise is 22 MB, too much for this rank. The other one waits for it in the first exchange.
    message = failure(workers, width=1024, height=1024, frames=81, steps=1)
    assert f"rank 1 on {socket.gethostname()} (process {pids[1]}, cpu) ran out of memory in " in message
    assert "Smaller" in message or "smaller size" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_open_a_file(workers: Workers, rank: int) -> None:
    """The other rank waits for it in the first exchange of loading."""
    run(workers)
    pids, begin = ranks(workers), time.monotonic()
    open_no_more_files(pids[rank])
    with pytest.raises(WorkerError) as raised:
        WorkerEngine(workers).generate(replace(TINY, precision="bf16"), Request(**SMALL))
    assert time.monotonic() - begin < 20
    message = str(raised.value)
    assert f"rank {rank} on {socket.gethostname()} (process {pids[rank]}, cpu) refused the request" in message
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


def test_a_full_disk_does_not_stop_the_video(workers: Workers, tmp_path: Path, alone: torch.Tensor) -> None:
    """Rank 0 may not write a byte: a note says that the latents were not kept, and the video is finished."""
    pids = ranks(workers)
    resource.prlimit(pids[0], resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    result = run(workers, keep_latents=tmp_path / "kept.safetensors")
    assert any("could not be kept" in note for note in result.report.notes) and not list(tmp_path.iterdir())
    assert (result.latents - alone).abs().max() < 1e-4
    resource.prlimit(pids[0], resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    result = run(workers, keep_latents=tmp_path / "kept.safetensors")
    assert torch.equal(load_latents(tmp_path / "kept.safetensors")[0], result.latents)
    assert ranks(workers) == pids


def test_a_refused_request_does_not_end_the_ranks(workers: Workers) -> None:
    pids = ranks(workers)
    with pytest.raises(OptionError, match="18 frames given"):
        run(workers, frames=18)
    with pytest.raises(OptionError, match=r"gone\.safetensors"):
        WorkerEngine(workers).generate(LoadOptions(model="tiny", high="gone.safetensors"), Request(**SMALL))
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
                workers.call("generate", fields_of(asked, mesh), poll=enough, on_event=lambda *_, e=enough: e())
            assert torch.equal(run(workers, **asked).latents, exact)
    assert ranks(workers) == pids


def fields_of(asked: dict[str, Any], mesh: str) -> dict[str, Any]:
    asked = {"models": asdict(TINY), "request": asdict(Request(**asked)), "mesh": mesh}
    return {**asked, "files": [], "keep": None, "must_keep": False, "keep_clips": None}


def test_an_interruption_does_not_wait_for_the_step(workers: Workers) -> None:
    """One step that takes seconds: interrupted as it begins, it ends within a third of it."""
    asked = {**SMALL, "steps": 2, "width": 288, "height": 288, "frames": 25}
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


def test_workers_that_are_dropped_end() -> None:
    """Workers end without a call, for example when a node is removed from its graph."""
    dropped = Workers(WorkerOptions(devices=("cpu",), **TIMEOUTS))
    with forking(ranks=1):
        dropped.call("ping")
    mine = all_of(dropped)
    assert len(mine) == 2
    folder = dropped._processes.folder if dropped._processes else ""
    assert Path(folder).is_dir()
    del dropped
    wait_until_gone(mine)
    wait_until(lambda: not Path(folder).exists(), 20, folder)


def test_a_wrong_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks know another key than the program."""
    monkeypatch.setattr(worker_processes, "Listener", lambda key: Listener(new_key()))
    others, begin = below(os.getpid()), time.monotonic()
    refused = Workers(WorkerOptions(devices=("cpu",), **TIMEOUTS))
    with forking(ranks=1), pytest.raises(WorkerError, match="refused the key of this worker"):
        run(refused)
    assert time.monotonic() - begin < 40
    wait_until_gone(below(os.getpid()) - others)


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

"""The worker processes as an engine: methods of `jobs.Jobs`, called on all ranks."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wan_core import __version__
from wan_core.config import LoadOptions, Request
from wan_core.config.changes import stamps
from wan_core.config.keys import model_paths
from wan_core.execution.report import Phase, Report
from wan_core.media.feed import Feed
from wan_core.pipeline.check import check_request
from wan_core.pipeline.decode import WriteFrames, use_all
from wan_core.pipeline.kept_steps import ENDING
from wan_core.pipeline.pipeline import Result
from wan_core.pipeline.run import SILENT, OnStep, Watch, WriteVideo
from wan_core.sampling.denoise import Progress
from wan_core.sampling.plan import Plan
from wan_core.sampling.start import Leftover
from wan_core.workers.launcher import WorkerError, Workers
from wan_core.workers.processes import Frame
from wan_core.workers.wire import call, pack, unpack

log = logging.getLogger(__name__)
EVENT = ("kind", "name", "number")  # in the header of an event, beside its values
Generated = tuple[Tensor, int, Plan, tuple[Path, ...]]
"""Latents, frames per second, plan and kept clips of a video; its frames are events."""


class WorkerEngine:
    """Worker processes as an engine. What they have loaded stays with them while it fits the next request. poll: called
    while they work; may raise to interrupt."""

    def __init__(self, workers: Workers, poll: Callable[[], None] = lambda: None) -> None:
        self.workers, self.poll = workers, poll

    def ask(
        self,
        kind: Any,
        method: str,
        models: Any,
        report: Report | None = None,
        events: Mapping[str, Callable[..., object]] = MappingProxyType({}),
        **arguments: Any,
    ) -> Any:
        """What a method of `Jobs` returns on all ranks: a value of type `kind`.

        models: what the request loads, with paths; a file that was replaced is read again. events: called with what the
        ranks tell under these names; other events are ignored. report: gets times and notes of the ranks, and all
        seconds of the request are in its phases, `start workers` and `to and from workers` among them.
        """
        begin = time.perf_counter()
        sent, tensors = self._packed({"models": models, **arguments})

        def on_event(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
            if (handler := events.get(header["name"])) is not None:
                call(handler, {name: value for name, value in header.items() if name not in EVENT}, tensors)

        answer, made = self.workers.call(method, sent, tensors, on_event=on_event, poll=self.poll)
        if report is not None:
            other, seconds = unpack(Report, answer["report"]), time.perf_counter() - begin
            if self.workers.start_seconds >= 0.01:
                other.phases = {"start workers": Phase(self.workers.start_seconds)} | other.phases
            other.add_rest("to and from workers", seconds)
            add_report(report, other)
        return unpack(kind, answer["result"], made)

    def _packed(self, arguments: Mapping[str, Any]) -> Frame:
        tensors: dict[str, Tensor] = {}
        sent = pack(arguments, tensors, "sent")
        return sent | {"files": stamps(model_paths(sent["models"])), "mesh": self.workers.options.mesh}, tensors

    def generate(self, options: LoadOptions, request: Request, watch: Watch = SILENT) -> Result:
        """Rank 0, on this host, writes kept latents. What the ranks would refuse is refused before they start."""
        if self.workers.options.here and not self.workers.is_running:
            job = check_request(options, request, torch.device(self.workers.options.devices[0]))
            if watch.must_keep:
                job.check_saved()
            assert job.models is not None
            watch.found(job.models, job.plan)
        plans: list[Plan] = []
        report = Report(torch.device("cpu"))

        def planned(plan: Plan) -> None:
            plans.append(plan)
            watch.planned(plan)

        events = {
            "plan": planned,
            "phase": lambda phase: watch.phase(phase),
            "kept": lambda path: watch.kept(Path(path)),
            "not kept": warn_not_kept,
            "step": on_steps(plans, watch.step),
        }
        places = {"keep": watch.keep_latents, "keep_clips": watch.keep_clips}
        places = {name: None if path is None else path.absolute() for name, path in places.items()}
        with _arriving(watch.write) as (of_frames, finish):
            asked, events = {"request": request, "must_keep": watch.must_keep, **places}, events | of_frames
            latents, fps, plan, kept = self.ask(Generated, "generate", options, report, events, **asked)
            with report.phase("write"):
                frames = finish()
        return Result(frames, latents, fps, plan, report, kept)

    def sample(
        self,
        models: LoadOptions,
        report: Report,
        events: Mapping[str, Callable[..., object]],
        *,
        keep: Path | None,
        fps: int,
        **how: Any,
    ) -> tuple[Tensor, Leftover | None]:
        """What `Jobs.sample` returns, how: its other arguments. keep: where rank 0 writes the latents before it sends
        them, and beside it those of a step; the files are deleted when they have arrived."""
        key = _key(*self._packed({"models": models, **how}))
        step = None if keep is None else keep.absolute().with_name(f"unfinished-step-{key[:12]}{ENDING}")
        where = {"keep": keep and keep.absolute(), "keep_step": step, "key": key, "settings": report.settings}
        try:
            made = self.ask(tuple[Tensor, Leftover | None], "sample", models, report, events, fps=fps, **how, **where)
        except WorkerError as fault:
            if step is not None and step.is_file():
                raise WorkerError(f"{fault} Its steps are kept in {step}: run the same again to go on") from fault
            raise
        for path in (keep, step):
            if path is not None:
                with suppress(OSError):  # the folder was read-only, and nothing was kept
                    path.unlink(missing_ok=True)
        return made

    def close(self) -> None:
        self.workers.stop()


def on_steps(plans: Sequence[Plan], on_step: OnStep | None) -> Callable[..., None]:
    """The handler of `step` events, for steps of the last of `plans`."""

    def step(
        index: int,
        forwards: int,
        seconds: float | None,
        preview: Tensor | None,
        clip: tuple[int, int],
        later: float,
    ) -> None:
        if on_step is not None:
            plan = plans[-1]
            done = Progress(plan.steps[index], plan, forwards, preview, None, clip, later)
            on_step(done, seconds)

    return step


def warn_not_kept(path: str, text: str) -> None:
    log.warning("%s", text)


def _key(sent: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A hash of all that decides the latents of a request to sample."""
    made = hashlib.sha256(json.dumps([__version__, torch.__version__, sent], sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        made.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        made.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


@contextmanager
def _arriving(write: WriteVideo | None) -> Iterator[tuple[dict[str, Callable[..., None]], Callable[[], np.ndarray]]]:
    """Handlers for the frames that the ranks send, which are written in a thread while others arrive, and what waits
    for the end of that and returns frames [F, H, W, 3]."""
    feeds: list[Feed[np.ndarray, np.ndarray]] = []

    def video(fps: int, settings: dict[str, Any]) -> None:
        write_frames = None if write is None else partial(write, fps=fps, settings=settings)
        feed = Feed[np.ndarray, np.ndarray](lambda frames: _stacked(frames, settings["frames"], write_frames))
        feeds.append(stack.enter_context(feed))

    def frame(frame: Tensor) -> None:
        feeds[0].put(frame.numpy())

    with ExitStack() as stack:
        yield {"video": video, "frame": frame}, lambda: feeds[0].finish()


def _stacked(frames: Iterator[np.ndarray], count: int, write: WriteFrames | None) -> np.ndarray:
    """All `count` frames [F, H, W, 3], each also given to `write` when it is there: nothing is left for the end."""
    whole: list[np.ndarray] = []

    def keep(index: int, frame: np.ndarray) -> np.ndarray:
        if not whole:
            whole.append(np.empty((count, *frame.shape), frame.dtype))
        whole[0][index] = frame
        return whole[0][index]

    kept = map(keep, itertools.count(), frames)
    use_all(kept, write)
    return whole[0]


def add_report(report: Report, other: Report) -> None:
    """Add the workers' report of their part of a run to `report`."""
    report.workers = report.workers or other.workers
    report.settings |= other.settings
    for values, more in zip(vars(report).values(), vars(other).values(), strict=True):
        if isinstance(values, list):
            values += more
    for name, phase in other.phases.items():
        if name in report.phases:
            phase.seconds += report.phases[name].seconds
        report.phases[name] = phase

"""The worker processes as an engine: requests as methods."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wan_core import __version__
from wan_core.config import LoadOptions, Request
from wan_core.config.keys import model_paths, stamps
from wan_core.execution.report import Phase, Report
from wan_core.media.feed import Feed
from wan_core.models.text.tokenizer import TokenCount
from wan_core.pipeline.check import check_request
from wan_core.pipeline.decode import Made, Pieces, WriteFrames, in_this_mode
from wan_core.pipeline.kept_steps import ENDING
from wan_core.pipeline.pipeline import Result, WriteVideo
from wan_core.pipeline.run import SILENT, OnStep, Watch
from wan_core.sampling.denoise import Progress
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.bounds import StepErrors
from wan_core.sampling.start import Leftover, Start
from wan_core.workers.launcher import WorkerError, Workers
from wan_core.workers.processes import Frame
from wan_core.workers.wire import pack, report_from, unpack

log = logging.getLogger(__name__)


class WorkerEngine:
    """Worker processes as an engine: a whole video, or its parts as a graph of nodes needs them. What they have loaded
    stays with them while it fits the next request. poll: called while they work; may raise to interrupt."""

    def __init__(self, workers: Workers, poll: Callable[[], None] = lambda: None) -> None:
        self.workers, self.poll = workers, poll

    def generate(
        self,
        options: LoadOptions,
        request: Request,
        watch: Watch = SILENT,
        *,
        keep_latents: Path | None = None,
        must_keep: bool = False,
        keep_clips: Path | None = None,
        write: WriteVideo | None = None,
    ) -> Result:
        """Rank 0, on this host, writes the finished latents to `keep_latents`, those of clips into `keep_clips`. What
        the ranks would refuse is refused before they start."""
        if self.workers.options.here and not self.workers.is_running:
            checked = check_request(options, request, torch.device(self.workers.options.devices[0]))
            if must_keep:
                checked.job.check_saved()
            watch.found(checked.models, checked.job.plan)
        plan: Plan | None = None
        video = _ArrivingVideo(write)

        def event(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
            nonlocal plan
            if header["name"] == "plan":
                plan = decided = unpack(Plan, header["plan"])
                watch.planned(decided)
            elif header["name"] == "phase":
                watch.phase(header["phase"])
            elif header["name"] == "kept":
                watch.kept(Path(header["path"]))
            elif header["name"] == "not kept":
                log.warning("%s", header["text"])
            elif header["name"] == "video":
                video.begin(header["fps"], header["settings"])
            elif header["name"] == "frame":
                video.put(tensors["frame"].numpy())
            elif header["name"] == "step" and watch.step is not None:
                assert plan is not None
                place = {"clip": tuple(header["clip"]), "later": header["later"]}
                place["attention"] = unpack(StepErrors | None, header["attention"])
                watch.step(Progress(plan.steps[header["step"]], plan, header["forwards"], **place), header["seconds"])

        fields = {
            "options": asdict(options),
            "request": asdict(request),
            "files": stamps(model_paths(asdict(options))),
            "mesh": self.workers.options.mesh,
            "keep": None if keep_latents is None else str(keep_latents.absolute()),
            "must_keep": must_keep,
            "keep_clips": None if keep_clips is None else str(keep_clips.absolute()),
        }
        report = Report(torch.device("cpu"))
        with video:
            found, tensors = self._reported("generate", report, fields, on_event=event)
            with report.phase("write"):
                frames = video.finish()
        kept = tuple(map(Path, found["kept_clips"]))
        return Result(frames, tensors["latents"], found["fps"], unpack(Plan, found["plan"]), report, kept)

    def sample(
        self,
        model: Mapping[str, Any],
        plan: Plan,
        conditioning: Mapping[str, Tensor],
        *,
        start: Start,
        batched: bool,
        report: Report,
        fps: int,
        keep: Path | None = None,
        on_step: OnStep | None = None,
        on_phase: Callable[[str], None] = lambda _: None,
        on_leftover: Callable[[Leftover], None] = lambda _: None,
    ) -> Tensor:
        """Sample on all workers (see `sample.sample_latents`) -> un-normalised latents float32 on the CPU.

        model: `LoadOptions` with the paths of the experts, as a dict. conditioning: the fields of `Conditioning` that
        are set. keep: where rank 0 writes the latents before it sends them, and beside it those of a step; the files
        are deleted when they have arrived.
        Times and notes are added to `report`.
        """

        def event(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
            if header["name"] == "phase":
                on_phase(header["phase"])
            elif header["name"] == "not kept":
                log.warning("%s", header["text"])
            elif header["name"] == "step" and on_step is not None:
                step = plan.steps[header["step"]]
                errors = unpack(StepErrors | None, header["attention"])
                picture = tensors.get("preview")
                on_step(Progress(step, plan, header["forwards"], picture, attention=errors), header["seconds"])

        tensors: dict[str, Tensor] = {}
        fields = {
            "model": dict(model),
            "files": stamps(model_paths(model)),
            "mesh": self.workers.options.mesh,
            "plan": asdict(plan),
            "start": pack(start, tensors, "start"),
            "batched": batched,
            "keep": None if keep is None else str(keep.absolute()),
            "fps": fps,
            "settings": report.settings,
        }
        sent = {**conditioning, **tensors}
        fields["key"] = key = _key(fields, sent)
        step = None if keep is None else keep.absolute().with_name(f"unfinished-step-{key[:12]}{ENDING}")
        fields["keep_step"] = None if step is None else str(step)
        try:
            found, made = self._reported("sample", report, fields, sent, on_event=event, poll=self.poll)
        except WorkerError as fault:
            if step is not None and step.is_file():
                raise WorkerError(f"{fault} Its steps are kept in {step}: run the same again to go on") from fault
            raise
        for path in (keep, step):
            if path is not None:
                with suppress(OSError):  # the folder was read-only, and nothing was kept
                    path.unlink(missing_ok=True)
        if found["leftover"] is not None:
            on_leftover(unpack(Leftover, found["leftover"], made))
        return made["latents"]

    def decode_to(
        self,
        vae: Mapping[str, Any],
        latents: Tensor,
        report: Report,
        consume: Callable[[Pieces], Made],
        *,
        dtype: torch.dtype,
        tile: Mapping[str, int] | None = None,
        on_frames: Callable[[int, int], None] = lambda done, total: None,
        rest: str = "decode",
    ) -> Made:
        """Decode in the workers, see `images.decode_to`. vae: path and precision."""
        fields = {"vae": dict(vae), "files": stamps(model_paths(vae)), "uint8": dtype == torch.uint8}
        fields["tile"] = None if tile is None else dict(tile)
        with Feed(in_this_mode(consume)) as feed:

            def event(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
                if header["name"] == "frames":
                    on_frames(header["done"], header["total"])
                elif header["name"] == "piece":
                    feed.put((header["first"], tensors["images"]))

            self._reported("decode", report, fields, {"latents": latents}, on_event=event, poll=self.poll)
            with report.phase(rest):
                return feed.finish()

    def encode(self, vae: Mapping[str, Any], images: Tensor) -> Tensor:
        """Encode in the workers, see `images.encode_images`: images [F, H, W, 3] in 0..1 to latents float32 [1, C, T,
        Y, X]."""
        fields = {"vae": dict(vae), "files": stamps(model_paths(vae))}
        return self.workers.call("encode", fields, {"images": images}, poll=self.poll)[1]["latents"]

    def text(
        self,
        text_encoder: Mapping[str, Any],
        prompts: Sequence[str],
    ) -> tuple[list[Tensor], list[TokenCount]]:
        """Text rows [L, dim] of each prompt, without padding, and its tokens. text_encoder: path and precision."""
        fields = {
            "text_encoder": dict(text_encoder),
            "files": stamps(model_paths(text_encoder)),
            "prompts": list(prompts),
        }
        found, tensors = self.workers.call("text", fields, poll=self.poll)
        counts = [TokenCount(*count) for count in found["counts"]]
        return [row[: count.read] for row, count in zip(tensors["rows"], counts, strict=True)], counts

    def _reported(self, op: str, report: Report, *sent: Any, **how: Any) -> Frame:
        """The answer to a request, of which all seconds are in phases of `report`: those of the ranks, `start workers`
        and `to and from workers`."""
        begin = time.perf_counter()
        frame = self.workers.call(op, *sent, **how)
        other, seconds = report_from(frame[0]["report"]), time.perf_counter() - begin
        if self.workers.start_seconds >= 0.01:
            other.phases = {"start workers": Phase(self.workers.start_seconds)} | other.phases
        other.add_rest("to and from workers", seconds)
        add_report(report, other)
        return frame

    def close(self) -> None:
        """End the processes."""
        self.workers.stop()


def _key(fields: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """A hash of all that decides the latents of a request to sample; its other fields are where they are kept, and what
    their file says."""
    decided = {name: value for name, value in fields.items() if name not in ("keep", "settings", "fps")}
    made = hashlib.sha256(json.dumps([__version__, torch.__version__, decided], sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        made.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        made.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


class _ArrivingVideo:
    """Frames that the workers send, written in a thread while others arrive."""

    def __init__(self, write: WriteVideo | None) -> None:
        self.write = write
        self.feed: Feed[np.ndarray, np.ndarray] | None = None

    def __enter__(self) -> _ArrivingVideo:
        return self

    def __exit__(self, *_: object) -> None:
        if self.feed is not None:
            self.feed.__exit__()

    def begin(self, fps: int, settings: Mapping[str, Any]) -> None:
        write = None if self.write is None else partial(self.write, fps=fps, settings=settings)
        self.feed = Feed[np.ndarray, np.ndarray](lambda frames: _stacked(frames, settings["frames"], write)).__enter__()

    def put(self, frame: np.ndarray) -> None:
        assert self.feed is not None
        self.feed.put(frame)

    def finish(self) -> np.ndarray:
        """Frames [F, H, W, 3], when they are written too."""
        assert self.feed is not None
        return self.feed.finish()


def _stacked(frames: Iterator[np.ndarray], count: int, write: WriteFrames | None) -> np.ndarray:
    """All `count` frames [F, H, W, 3], each also given to `write` when it is there: nothing is left for the end."""
    whole: list[np.ndarray] = []

    def keep(index: int, frame: np.ndarray) -> np.ndarray:
        if not whole:
            whole.append(np.empty((count, *frame.shape), frame.dtype))
        whole[0][index] = frame
        return whole[0][index]

    kept = map(keep, itertools.count(), frames)
    if write is not None:
        write(kept)
    for _ in kept:  # all of them are needed, however `write` ended
        pass
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

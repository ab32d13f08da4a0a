"""A prompt becomes a video, in named stages: check, load, encode, denoise, decode.

    pipe = Pipeline.load(LoadOptions(model="tiny"))
    result = pipe.generate(Request(prompt="a red circle moving right on a blue background", seed=1))

Each stage is a file of this folder. `Pipeline.generate` calls them in order; for a long video, `ClipRun` (`clips.py`)
calls the last three for each clip.

Legend: C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from wan_core.checkpoint.save import try_to_save_latents
from wan_core.checkpoint.staged import USUAL, Reading
from wan_core.config import LoadOptions, Request
from wan_core.execution.report import Report
from wan_core.parallel.mesh import RankMesh
from wan_core.pipeline.check import Job, check_request, make_job
from wan_core.pipeline.clips import ClipRun, kept_latents, remove_kept
from wan_core.pipeline.decode import decode_latents
from wan_core.pipeline.denoise import sample
from wan_core.pipeline.encode import encode_media, encode_start, encode_text
from wan_core.pipeline.first_use import forward_each_kind
from wan_core.pipeline.kept_steps import reached_of_all
from wan_core.pipeline.load import Models, load_models
from wan_core.pipeline.run import COMPILING, SILENT, Run, Watch, begin
from wan_core.pipeline.settings import choose_device
from wan_core.pipeline.sources import find_models, for_request
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import retried
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Expert

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """`frames` uint8 [F, H, W, 3]; `latents` un-normalised float32 [1, C, T, Y, X] on the CPU. `kept_clips`:
    files that a later run of the same video would go on from; `remove_kept` removes them."""

    frames: np.ndarray
    latents: Tensor
    fps: int
    plan: Plan
    report: Report
    kept_clips: tuple[Path, ...] = ()


class Pipeline:
    """The models of one task, ready to generate. Build it with `Pipeline.load`."""

    def __init__(self, models: Models, report: Report) -> None:
        self.models = models
        self.loaded = report  # of loading alone
        self.report = report.branch()  # of the newest generation
        self.checked: Job | None = None  # of the request that is prepared next, where it was checked already

    @classmethod
    def load(
        cls,
        options: LoadOptions,
        *,
        request: Request | None = None,
        ranks: RankMesh | None = None,
        watch: Watch = SILENT,
        how: Reading = USUAL,
    ) -> Pipeline:
        """Recognise the files, then load them. A `request` given here is checked in between, before any weights are
        read, and picks the embedded model's image variant if it has an image. ranks: those that do all of it together,
        each calling this and everything after it alike, on its own device; all have the same results. how: files
        are read. Raises CheckpointError, OptionError or AttentionError."""
        report = Report(choose_device(options.device) if ranks is None else ranks.device)
        with report.phase("load"):
            if request is not None:
                return cls.load_checked(check_request(options, request, report.device), report, watch, ranks, how)
            parts = find_models(options)
            watch.found(parts, None)
            return cls(load_models(parts, options, report, None, ranks, how), report)

    @classmethod
    def load_checked(
        cls,
        job: Job,
        report: Report,
        watch: Watch = SILENT,
        ranks: RankMesh | None = None,
        how: Reading = USUAL,
    ) -> Pipeline:
        assert job.models is not None and job.options is not None
        watch.found(job.models, job.plan)
        pipe = cls(load_models(job.models, job.options, report, job.plan, ranks, how), report)
        pipe.checked = job
        return pipe

    @torch.no_grad()
    def generate(self, request: Request, watch: Watch = SILENT) -> Result:
        """Make one video. Raises what the callbacks of `watch` raise."""
        run = self.prepare(request)
        job, report, watch = run.job, run.report, saving(run, watch)
        write_frames = None if watch.write is None else partial(watch.write, fps=job.fps, settings=report.settings)
        watch.planned(job.plan)
        if not job.alone:
            clips = ClipRun(run, watch.keep_clips)
            latents = clips.make(watch, write_frames)  # those of all clips in order
            return Result(clips.frames, latents, job.fps, job.plan, report, tuple(one.path for one in clips.kept))
        watch.phase("text")
        conditioning, start = self.encode(run), encode_start(run)
        if self.models.compiles:
            watch.phase(COMPILING)
        watch.phase("denoise")
        [kept] = kept_latents(run, watch.keep_clips, 1) or [None]
        reached = reached_of_all(kept, self.models.ranks, job.plan, job.clip_shape(job.clips[0]), self.models.device)
        latents = sample(run, conditioning, watch.step, watch.checks, start, kept=kept, reached=reached)
        watch.latents(latents)
        if kept is not None and watch.keep_latents is not None and watch.keep_latents.is_file():
            remove_kept([kept.path])
        watch.phase("decode")
        frames = decode_latents(run.vae(), latents, report, write_frames)
        return Result(frames, latents.cpu(), job.fps, job.plan, report, () if kept is None else (kept.path,))

    def prepare(self, request: Request) -> Run:
        """Check: fill in what the request leaves open and check all of it; begins a new report. Raises OptionError."""
        self.report = self.loaded.branch()
        job, self.checked = self.checked, None
        if job is None or job.request is not request:
            job = make_job(request, self.models.facts)
        self.models = self.models.at_speed(job.plan.speed)
        return begin(self.models, job, self.report)

    @staticmethod
    @torch.no_grad()
    def encode(run: Run) -> Conditioning:
        """Text and media: what the denoising loop needs; of a long video, for its first clip."""
        return encode_media(run, encode_text(run))

    sample = staticmethod(sample)

    @torch.no_grad()
    def warm_up(self, request: Request, on_phase: Callable[[str], None] = lambda _: None) -> None:
        """One forward of each expert at the size of a request, so that the first video runs as fast as later ones.

        It loads kernels, compiles blocks, lets cuDNN and cuBLAS choose their algorithms for this size, and brings the
        weights to where they will be. Each expert runs once: with a large shift the change of experts comes late, and
        the first two steps would never reach the second one. The expert that a run starts with comes last, so that it
        is on the device then. If memory runs out, it goes on as a run does.

        on_phase: called with "warm up high", "warm up low"; "compile ..." for the forward that compiles the blocks.
        """
        run = self.prepare(request)

        def forward(expert: Expert) -> None:
            steps = [step for step in run.job.plan.steps if step.expert == expert]
            forward_each_kind(self.models.expert(expert), run.job.plan, steps, self.models.device)

        for expert in reversed(run.job.plan.experts):
            on_phase(f"{'compile' if self.models.compiles else 'warm up'} {expert}")
            with run.report.phase(f"warm up {expert}"):
                retried(run.memory, expert, forward, expert)


def saving(run: Run, watch: Watch) -> Watch:
    """`watch`, whose `latents` also writes to `keep_latents` and calls `kept`; a warning where that fails."""
    path = watch.keep_latents

    def save(latents: Tensor) -> None:
        assert path is not None
        with run.report.phase("save latents"):
            failed = try_to_save_latents(path, latents, run.job.fps, run.report.settings)
        if failed is None:
            watch.kept(path)
        else:
            log.warning("%s", failed)
            run.report.notes.append(failed)
        watch.latents(latents)

    return watch if path is None else replace(watch, latents=save)


def metadata(settings: Mapping[str, Any]) -> dict[str, str]:
    """What goes into a video file: the settings that made it, as text."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}


class Engine(Protocol):
    """Who makes a video: this process or worker processes; whoever asks for one need not know which.

    It loads what it needs, keeps it while it fits the next request, and has everything end with `close`."""

    def generate(self, options: LoadOptions, request: Request, watch: Watch = SILENT) -> Result:
        """Load the models and generate a video, see `Pipeline.load` and `Pipeline.generate`."""
        ...

    def close(self) -> None: ...


class LocalEngine:
    def __init__(self) -> None:
        self.loaded: tuple[object, Pipeline] | None = None  # what the models were loaded by, and they

    def load(self, options: LoadOptions, request: Request, watch: Watch = SILENT) -> Pipeline:
        """The models for `request`: those of the request before where they fit."""
        spec = for_request(options, request), bool(request.pictures)
        if self.loaded is None or self.loaded[0] != spec:
            self.loaded = None  # gone before the next is loaded
            self.loaded = spec, Pipeline.load(options, request=request, watch=watch, how=Reading(on_bytes=watch.read))
            watch.loaded()
        return self.loaded[1]

    def generate(self, options: LoadOptions, request: Request, watch: Watch = SILENT) -> Result:
        if watch.must_keep:
            check_request(options, request, choose_device(options.device)).check_saved()
        return self.load(options, request, watch).generate(request, watch)

    def close(self) -> None:
        self.loaded = None

"""A long video, clip by clip: each begins with the last frames of the one before, and is kept as soon as it is
finished.

Legend: C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from wan_core.execution.report import Report
from wan_core.media.feed import Feed
from wan_core.media.fit import Box
from wan_core.models.wan.families import family_of
from wan_core.models.wan.families.clips import Clip, ClipRules
from wan_core.models.wan.families.family import MEDIA
from wan_core.models.wan.families.media import Media
from wan_core.parallel.conditioning import kept_of_all
from wan_core.pipeline.builder import Models
from wan_core.pipeline.hearing import hear
from wan_core.pipeline.images import Pieces, decode_to
from wan_core.pipeline.kept_clips import KeptClips, key_of
from wan_core.pipeline.own_memory import OwnMemory
from wan_core.pipeline.resolved_request import Job
from wan_core.pipeline.watch import OnStep, Watch
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import Progress
from wan_core.sampling.pace import BlockChecks

log = logging.getLogger(__name__)
# What a report says of a run that decides nothing of its result.
FILES = (*MEDIA, "image", "last_image")  # whose contents decide, and not their names
NOT_DECIDING = frozenset({"memory", "residency", *FILES, "models"})
Write = Callable[[Iterator[np.ndarray]], object]
Module = TypeVar("Module")


class ClipMaker(Protocol):
    """What a `Pipeline` does for one clip."""

    models: Models
    report: Report
    memory: OwnMemory

    def encode_text(self, job: Job) -> Conditioning: ...
    def first_frames(self, job: Job) -> dict[str, Tensor]: ...
    def seen(self, job: Job, media: Mapping[str, Tensor], clip: Clip) -> dict[str, Tensor]: ...
    def sample(
        self,
        job: Job,
        conditioning: Conditioning,
        on_step: OnStep | None = None,
        checks: BlockChecks | None = None,
        *,
        clip: int = 0,
    ) -> Tensor: ...


class ClipRun:
    """One long video on the models of a pipeline."""

    def __init__(self, pipe: ClipMaker, job: Job, keep: Path | None) -> None:
        self.pipe, self.job = pipe, job
        with pipe.report.phase("read media"):
            self.media = load_clip_media(pipe, job)
            first = pipe.models.ranks is None or pipe.models.ranks.rank == 0
            self.kept = KeptClips(keep, run_key(pipe, job)) if keep is not None and first else None
        self.frames = np.empty((job.frames, self.crop.height, self.crop.width, 3), np.uint8)

    @property
    def crop(self) -> Box:
        return Box(0, 0, self.job.width, self.job.height) if self.media is None else self.media.crop

    def run(self, watch: Watch, write: Write | None) -> Tensor:
        """The latents of all clips, one after the other [1, C, sum of T, Y, X] on the CPU; `frames` then has the video.
        write: called in a thread of its own with the frames [H, W, 3], each as soon as it is finished."""
        watch.phase("text")
        text = self.pipe.encode_text(self.job)
        with Feed[np.ndarray, None](lambda frames: use_all(frames, write)) as feed:
            made, carried = [], None
            for clip in self.job.clips:
                given = given_to(self.pipe, self.job, clip, self.media, carried)
                latents = self.latents(clip, given, text, watch)
                made.append(latents.cpu())
                watch.phase("decode")
                carried = self.decode(clip, latents, given.get("lead"), carried, feed.put)
            with self.pipe.report.phase("decode" if write is None else "write"):
                feed.finish()
        self.note_kept()
        return torch.cat(made, 2)

    def latents(self, clip: Clip, given: Mapping[str, Tensor], text: Conditioning, watch: Watch) -> Tensor:
        """Un-normalised latents of one clip: kept by an earlier run, or made now."""
        shape = self.job.clip_shape(clip)
        found = None if self.kept is None else self.kept.find(clip, shape)
        found = kept_of_all(self.pipe.models.ranks, found, shape)
        if found is not None:
            self.pipe.report.notes.append(f"clip {clip.number + 1} was finished by an earlier run")
            return found.to(self.pipe.models.device)
        conditioning = condition(self.pipe, self.job, clip, given, text)
        watch.phase("denoise")
        told = None if watch.step is None else self.told(clip, watch.step)
        latents = self.pipe.sample(self.job, conditioning, told, watch.checks, clip=clip.number)
        if self.kept is not None:
            with self.pipe.report.phase("save latents"):
                self.kept.keep(clip, latents, self.job.fps)
        return latents

    def told(self, clip: Clip, on_step: OnStep) -> OnStep:
        """`on_step` with the place among the clips."""
        job, tokens = self.job, self.pipe.models.dit_config.tokens
        own = tokens(*job.clip_shape(clip)[2:])
        after = sum(tokens(*job.clip_shape(later)[2:]) / own for later in job.clips[clip.number + 1 :])
        later = after * sum(step.forwards * step.cost for step in job.plan.steps)

        def note(progress: Progress, seconds: float | None) -> None:
            on_step(replace(progress, clip=(clip.number + 1, len(job.clips)), later=later), seconds)

        return note

    def decode(
        self,
        clip: Clip,
        latents: Tensor,
        lead: Tensor | None,
        carried: Tensor | None,
        put: Callable[[np.ndarray], None],
    ) -> Tensor:
        """Decode a clip after the latents `lead` and put its new frames into the video. Returns the frames that the
        next clip begins with, or that came before it [1, 3, N, H, W] in -1..1. carried: those of this clip."""
        rules = family_of(self.job.task).clips
        own, (left, top, width, height) = latents[:, :, self.job.leading :], self.crop
        skipped = 0  # frames before those of the clip
        if lead is not None:
            own = torch.cat([lead.to(own), own], 2)
            skipped = (own.shape[2] - 1) * self.pipe.models.vae_config.temporal_stride + 1 - clip.frames
        kept = rules.history or self.job.clips[-1].carried
        before, tail = history(rules, carried, self.job), list[Tensor]()

        def collect(pieces: Pieces) -> None:
            for first, piece in pieces:
                if not first:  # also again, after out of memory
                    tail[:] = before
                mine = piece[max(0, skipped - first) :]
                tail[:] = [torch.cat([*tail, mine])[-kept:]] if kept else []
                shown = (piece[:, top : top + height, left : left + width] * 255).round_().to(torch.uint8).numpy()
                begin = clip.first + first - skipped
                new = range(max(clip.first + clip.carried, begin), min(self.job.frames, begin + len(piece)))
                for index in new:
                    self.frames[index] = shown[index - begin]

        vae = self.pipe.memory.fetch("vae", self.pipe.models.vae)
        decode_to(vae, own, self.pipe.report, collect, dtype=torch.float32)
        for index in range(clip.first + clip.carried, min(self.job.frames, clip.end)):
            put(self.frames[index])
        return (tail[0] * 2 - 1).permute(3, 0, 1, 2)[None] if tail else torch.empty(0)

    def note_kept(self) -> None:
        """Say what became of kept clips."""
        if self.kept is None:
            return
        if others := self.kept.others():
            self.kept.notes.append(f"{others} kept clips of other videos are in {self.kept.folder}, left as they are")
        for note in self.kept.notes:
            log.warning("%s", note)
        self.pipe.report.notes += self.kept.notes


def use_all(frames: Iterator[np.ndarray], write: Write | None) -> None:
    if write is not None:
        write(frames)
    for _ in frames:  # all of them are needed, however `write` ended
        pass


def history(rules: ClipRules, carried: Tensor | None, job: Job) -> list[Tensor]:
    """The frames before a clip [N, H, W, 3] in 0..1, for a family that is given them: grey before the first."""
    if not rules.history:
        return []
    grey = torch.full((rules.history, job.height, job.width, 3), 0.5)
    return [grey if carried is None else (carried[0].permute(1, 2, 3, 0) + 1) / 2]


def load_clip_media(pipe: ClipMaker, job: Job) -> Media | None:
    """What drives the clips; None: nothing does."""
    family, models = family_of(job.task), pipe.models
    last = family.clips.driving(job.clips[-1])

    def states(path: str) -> Tensor:
        return hear(models.speech, path, models.residency, pipe.report)

    return family.load_media(job.request, models.dit_config, (job.width, job.height), job.fps, last, states)


def given_to(pipe: ClipMaker, job: Job, clip: Clip, media: Media | None, carried: Tensor | None) -> dict[str, Tensor]:
    """What a clip is made of, on the device, as `Family.clip_inputs` takes it."""
    device, family = pipe.models.device, family_of(job.task)
    rules = family.clips
    given = {} if media is None else {name: part.to(device) for name, part in media.of(rules.driving(clip)).items()}
    if carried is not None:
        given["carried"] = carried.to(device)
    else:
        given |= pipe.first_frames(job)
    if family.leads:
        vae = pipe.memory.fetch("vae", pipe.models.vae)
        with pipe.report.phase("encode video"):
            given["lead"] = family.clip_lead(vae, given, clip)
    return given


def condition(pipe: ClipMaker, job: Job, clip: Clip, given: Mapping[str, Tensor], text: Conditioning) -> Conditioning:
    """What the denoising loop needs for one clip."""
    family, seen = family_of(job.task), pipe.seen(job, given, clip)
    vae = pipe.memory.fetch("vae", pipe.models.vae)
    with pipe.report.phase("encode video"):
        inputs = family.clip_inputs(job.task, vae, seen, given, clip)
    return replace(text, **family.with_settings(job.request, inputs, text.inputs.get("pose_context")))


def run_key(pipe: ClipMaker, job: Job) -> str:
    """The key of everything that decides the video, see `key_of`."""
    models = pipe.models
    settings = {name: value for name, value in pipe.report.settings.items() if name not in NOT_DECIDING}
    settings |= {"plan": job.plan.as_dict(), "clips": job.clips, "torch": torch.__version__}
    settings["device"] = pipe.report.as_dict()["device"]
    files = [part.part.path for part in models.settings.parts.values() if part.part.path is not None]
    if job.request.audio is not None and models.speech.path is not None:
        files.append(models.speech.path)
    media = [getattr(job.request, field) for field in FILES]
    return key_of(settings, [*files, *models.loras], [Path(path) for path in media if path is not None])

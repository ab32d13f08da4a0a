"""A long video, clip by clip: each begins with the last frames of the one before.

The latents of each clip are kept in a folder until the video is complete (`kept_steps`), so that a run that was
interrupted goes on from them.

Legend: C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wan_core import __version__
from wan_core.config.changes import stamps
from wan_core.config.keys import key_of, model_paths
from wan_core.config.outputs import remove_left_over
from wan_core.execution.report import installed
from wan_core.media.feed import Feed
from wan_core.media.fit import Box
from wan_core.models.wan.families.clips import Clip, ClipRules, latents_of
from wan_core.pipeline.check import Job
from wan_core.pipeline.colours import ColourMatch, channel_means, note_drift, pixels_of, unit
from wan_core.pipeline.decode import Pieces, WriteFrames, decode_to, use_all
from wan_core.pipeline.denoise import sample
from wan_core.pipeline.encode import clip_media, condition, encode_text, load_media, text_of_clip
from wan_core.pipeline.kept_steps import ENDING, KeptLatents, Reached, reached_of_all
from wan_core.pipeline.run import OnStep, Run, Watch
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import Progress

# What a report says of a run that decides nothing of its result.
NOT_DECIDING = frozenset({"memory", "residency"})
# Libraries that compute a video.
COMPUTING = (
    "triton", "triton-windows", "flash-attn-4", "flash-attn", "sageattention", "nvidia-cudnn-frontend",
    "transformer-engine", "comfy-kitchen",
)  # fmt: skip
# Latents that are decoded again before those of an anchored clip, so that its first frames follow on the last ones.
LEAD = 8


class ClipRun:
    """One long video: media, denoise and decode repeat for each clip. keep: the folder of kept clips."""

    def __init__(self, run: Run, keep: Path | None) -> None:
        self.run, self.job = run, run.job
        with run.report.phase("read media"):
            self.media = load_media(run)
            self.kept = kept_latents(run, keep, len(self.job.clips))
        self.match = ColourMatch(self.job.request.match_colours, run.models.device)
        self.frames = np.empty((self.job.frames, self.crop.height, self.crop.width, 3), np.uint8)

    @property
    def crop(self) -> Box:
        return Box(0, 0, self.job.width, self.job.height) if self.media is None else self.media.crop

    def make(self, watch: Watch, write: WriteFrames | None) -> Tensor:
        """The latents of all clips, one after the other [1, C, sum of T, Y, X] on the CPU; `frames` then has the video.
        Of anchored clips they are those of one video, and `watch.latents` gets them. write: called in a thread of its
        own with the frames [H, W, 3], each as soon as it is finished."""
        watch.phase("text")
        text = encode_text(self.run)
        with Feed[np.ndarray, None](lambda frames: use_all(frames, write)) as feed:
            made, carried = [], None
            for clip in self.job.clips:
                media = clip_media(self.run, clip, self.media, carried)
                latents = self.latents(clip, media, text, watch)
                watch.phase("decode")
                if self.job.rules.anchored:
                    new = latents[:, :, latents_of(clip.carried) + 1 if clip.carried else 0 :]
                    made.append(new.cpu())
                    if clip is self.job.clips[-1]:
                        watch.latents(torch.cat(made, 2))
                    self.decode(clip, new, carried, None, feed.put)
                    carried = (new if carried is None else torch.cat([carried, new], 2))[:, :, -LEAD:]
                    continue
                made.append(latents.cpu())
                carried = self.decode(clip, latents, media.get("lead"), carried, feed.put)
            with self.run.report.phase("decode" if write is None else "write"):
                feed.finish()
        self.note_kept()
        note_drift(self.run.report)
        return torch.cat(made, 2)

    def latents(self, clip: Clip, media: Mapping[str, Tensor], text: Conditioning, watch: Watch) -> Tensor:
        """Un-normalised latents of one clip: kept by an earlier run, or made now."""
        models, report, shape = self.run.models, self.run.report, self.job.clip_shape(clip)
        kept = self.kept[clip.number] if self.kept else None
        reached = reached_of_all(kept, models.ranks, self.job.plan, shape, models.device)
        if reached is not None and reached.index == len(self.job.plan.steps):
            report.notes.append(f"clip {clip.number + 1} was finished by an earlier run")
            return reached.x
        conditioning = condition(self.run, clip, media, text_of_clip(self.run, text, clip))
        watch.phase("denoise")
        on_step = None if watch.step is None else self.on_step(clip, watch.step)
        latents = sample(self.run, conditioning, on_step, watch.checks, None, clip.number, kept, reached)
        if kept is not None:
            with report.phase("save latents"):
                kept.write(Reached(len(self.job.plan.steps), latents))
        return latents

    def on_step(self, clip: Clip, on_step: OnStep) -> OnStep:
        """`on_step` with the place among the clips."""
        job, tokens = self.job, self.run.models.dit_config.tokens
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
        rules = self.job.rules
        own, (left, top, width, height) = latents[:, :, self.job.long.leading :], self.crop
        skipped = 0  # frames before those of the clip
        if lead is not None:
            own = torch.cat([lead.to(own), own], 2)
            skipped = self.run.models.vae_config.video_frames(own.shape[2]) - clip.frames
        count = rules.history or self.job.clips[-1].carried
        before, tail = history(rules, carried, self.job), list[Tensor]()

        def collect(pieces: Pieces) -> None:
            for first, piece in pieces:
                if not first:  # also again, after out of memory
                    tail[:] = before
                mine = piece[max(0, skipped - first) :]
                tail[:] = [torch.cat([*tail, mine])[-count:]] if count else []
                shown = (piece[:, top : top + height, left : left + width] * 255).round_().to(torch.uint8).numpy()
                begin = clip.first + first - skipped
                new = range(max(clip.first + clip.carried, begin), min(self.job.frames, begin + len(piece)))
                for index in new:
                    self.frames[index] = shown[index - begin]

        decode_to(self.run.vae(), own, self.run.report, collect, dtype=torch.float32)
        shown = range(clip.first + clip.carried, min(self.job.frames, clip.end))
        change = self.match.change(self.frames[shown.start : shown.stop])
        if change is not None:
            with self.run.report.phase("match colours"):
                for index in shown:
                    self.frames[index] = pixels_of(change(unit(self.frames[index], self.match.device)))
                tail = [change(frames.to(self.match.device)).cpu() for frames in tail]
        for index in shown:
            put(self.frames[index])
        if len(shown):
            self.run.report.clips.append(channel_means(self.frames[shown.start : shown.stop]))
        return (tail[0] * 2 - 1).permute(3, 0, 1, 2)[None] if tail else torch.empty(0)

    def note_kept(self) -> None:
        """Say what else is in the folder of kept clips."""
        for folder in {one.path.parent for one in self.kept}:
            others = {*folder.glob(f"clip-*{ENDING}")} - {one.path for one in self.kept}
            if others:
                self.run.warn(f"{len(others)} kept clips of other videos are in {folder}, left as they are")


def history(rules: ClipRules, carried: Tensor | None, job: Job) -> list[Tensor]:
    """The frames before a clip [N, H, W, 3] in 0..1, for a family that is given them: grey before the first."""
    if not rules.history:
        return []
    grey = torch.full((rules.history, job.height, job.width, 3), 0.5)
    return [grey if carried is None else (carried[0].permute(1, 2, 3, 0) + 1) / 2]


def run_key(run: Run) -> str:
    """The key of everything that decides the video of a run: every option that was asked for (`config.keys`), what was
    resolved of them here, the model files (name, size, time of change), contents of media, and versions."""
    models, job, report = run.models, run.job, run.report.as_dict()
    settings = {name: value for name, value in report["settings"].items() if name not in NOT_DECIDING}
    options = models.settings.options
    files = [part.part.path for part in models.settings.parts.values() if part.part.path is not None]
    speech = models.settings.recognised.speech
    files += [speech.path] if speech is not None and speech.path is not None else []
    named = [path for path in model_paths(asdict(options)) if path != options.model]  # of a folder, its parts count
    decided: dict[str, Any] = {
        "asked": key_of(job.request, options),
        "settings": settings,
        "plan": job.plan.as_dict(),
        "clips": job.clips,
        "files": stamps([*files, *named]),
        "device": report["device"],
        "versions": [__version__, torch.__version__, installed(COMPUTING)],
    }
    return hashlib.sha256(json.dumps(decided, sort_keys=True, default=str).encode()).hexdigest()


def kept_latents(run: Run, folder: Path | None, clips: int) -> list[KeptLatents]:
    """Where the latents of so many clips are kept until the video is complete; none on all ranks but the first."""
    if folder is None or (run.models.ranks is not None and run.models.ranks.rank > 0):
        return []
    key = run_key(run)
    names = (f"clip-{clip + 1:03}-{key[:12]}{ENDING}" for clip in range(clips))
    return [KeptLatents(folder / name, key, run.warn, clip) for clip, name in enumerate(names)]


def remove_kept(clips: Collection[Path]) -> None:
    """Once the video is complete. Files of other runs, and the folder with them, stay."""
    for path in clips:
        with suppress(OSError):  # gone, or read-only by now
            path.unlink(missing_ok=True)
    for folder in {path.parent for path in clips}:
        with suppress(OSError):  # it is not empty
            remove_left_over(folder)
            folder.rmdir()

"""A prompt becomes a video: load, encode, denoise, decode, on one screen.

    pipe = Pipeline.load(LoadOptions(model="tiny"))
    result = pipe.generate(Request(prompt="a red circle moving right on a blue background", seed=1))

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from wan_core.checkpoint.latents import try_to_save_latents
from wan_core.checkpoint.staged import USUAL, Reading
from wan_core.config import LoadOptions, Request
from wan_core.execution.report import Report
from wan_core.media.video import load_image
from wan_core.models.text.tokenizer import TokenCount, prompt_notes
from wan_core.models.wan.families import family_of
from wan_core.models.wan.families.clips import Clip
from wan_core.models.wan.families.media import pixels_to_video
from wan_core.ops.attention.registry import resolve_attention
from wan_core.parallel.conditioning import counts_of_all, rows_of_all, text_rank
from wan_core.parallel.mesh import RankMesh
from wan_core.pipeline.builder import Models, load_models
from wan_core.pipeline.clips import ClipRun, condition, given_to, load_clip_media
from wan_core.pipeline.embedded import never_seen
from wan_core.pipeline.images import decode_latents, encode_images, load_video
from wan_core.pipeline.large_video import check_tensor, size_notes
from wan_core.pipeline.loras import lora_files
from wan_core.pipeline.memory_planning import Workload
from wan_core.pipeline.model_parts import Parts
from wan_core.pipeline.own_memory import OwnMemory
from wan_core.pipeline.resolved_request import Job, make_job
from wan_core.pipeline.sample import guidance_over, sample_latents
from wan_core.pipeline.settings import choose_device, compute_dtype
from wan_core.pipeline.sources import find_models, for_request
from wan_core.pipeline.watch import SILENT, OnStep, Watch
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import retried
from wan_core.sampling.pace import BlockChecks
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.run import check_kernel

log = logging.getLogger(__name__)
Module = TypeVar("Module")


class WriteVideo(Protocol):
    """Writes frames uint8 [H, W, 3] of a video that is made by these settings."""

    def __call__(self, frames: Iterator[np.ndarray], /, *, fps: int, settings: Mapping[str, Any]) -> None: ...


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
        self.memory = OwnMemory(models, self.report)
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
            found = find_models(options)
            watch.found(found, None)
            return cls(load_models(found, options, report, None, ranks, how), report)

    @classmethod
    def load_checked(
        cls,
        checked: CheckedRequest,
        report: Report,
        watch: Watch = SILENT,
        ranks: RankMesh | None = None,
        how: Reading = USUAL,
    ) -> Pipeline:
        """The models of a request that was checked."""
        watch.found(checked.models, checked.job.plan)
        workload = Workload.of(checked.job)
        pipe = cls(load_models(checked.models, checked.options, report, workload, ranks, how), report)
        pipe.checked = checked.job
        return pipe

    @torch.no_grad()
    def generate(
        self,
        request: Request,
        watch: Watch = SILENT,
        *,
        keep_latents: Path | None = None,
        keep_clips: Path | None = None,
        write: WriteVideo | None = None,
    ) -> Result:
        """Make one video. Finished latents are written to `keep_latents` before they are decoded, and stay there; if
        that fails, a warning and a note of the report say so, and they are decoded all the same.

        write: is given the frames while later ones are decoded, in a thread of its own. keep_clips: a folder for the
        latents of the finished clips of a long video; a later run of the same video goes on from them. `keep_latents`
        and `watch.latents` are not for those.
        """
        job = self.prepare(request)
        watch.planned(job.plan)
        if not job.alone:
            return self.generate_clips(job, watch, write, keep_clips)
        watch.phase("text")
        conditioning, start = self.encode(job), self.encode_video(job)
        if self.models.compiles:
            watch.phase("compile in the first step")
        watch.phase("denoise")
        latents = self.sample(job, conditioning, watch.step, watch.checks, start)
        if keep_latents is not None and self.keep(keep_latents, latents, job.fps):
            watch.kept(keep_latents)
        watch.latents(latents)
        watch.phase("decode")
        told = None if write is None else partial(write, fps=job.fps, settings=self.report.settings)
        frames = decode_latents(self.memory.fetch("vae", self.models.vae), latents, self.report, told)
        return Result(frames, latents.cpu(), job.fps, job.plan, self.report)

    def generate_clips(self, job: Job, watch: Watch, write: WriteVideo | None, keep: Path | None) -> Result:
        """Generate a long video clip by clip. The latents of the result are those of all clips in order."""
        run = ClipRun(self, job, keep)
        told = None if write is None else partial(write, fps=job.fps, settings=self.report.settings)
        latents = run.run(watch, told)
        kept = () if run.kept is None else tuple(run.kept.used)
        return Result(run.frames, latents, job.fps, job.plan, self.report, kept)

    def keep(self, path: Path, latents: Tensor, fps: int) -> bool:
        """Write finished latents to `path`; False, and a warning, where that is not possible."""
        with self.report.phase("save latents"):
            failed = try_to_save_latents(path, latents, fps, self.report.settings)
        if failed is not None:
            log.warning("%s", failed)
            self.report.notes.append(failed)
        return failed is None

    def prepare(self, request: Request) -> Job:
        """Fill in what the request leaves open and check all of it; begins a new report. Raises OptionError."""
        models = self.models
        self.report = self.loaded.branch()
        self.memory = OwnMemory(models, self.report)
        job, self.checked = self.checked, None
        if job is None or job.request is not request:
            files = models.checkpoint, models.low_checkpoint, models.loras
            job = make_job(request, models.task, models.dit_config, models.vae_config, *files)
        job = job.streamed() if models.residency.policy == "stream" else job
        memory = models.place(Workload.of(job))
        if memory is not None:
            self.report.settings["memory"] = memory.as_dict()
        self.report.settings |= {**job.settings(), "attention": models.attention, "residency": models.residency.policy}
        if models.ranks is not None:
            self.report.settings["mesh"] = str(models.ranks.mesh)
            self.report.notes.append(f"ranks: {models.ranks.mesh.describe()}")
            if (apart := guidance_over(models.ranks, job.plan)) is not None:
                self.report.settings["guidance_mode"], why = apart
                job = replace(job, batched=False, batched_why=why)
        self.report.notes.append(f"guidance: {'batched' if job.batched else 'sequential'} ({job.batched_why})")
        for note in [*never_seen(job), *size_notes(job.task, models.vae_config, job.width, job.height)]:
            self.warn(note)
        if models.ranks is None:
            dit, itemsize = models.dit_config, models.settings.dtype.itemsize
            check_tensor("an activation", (job.tokens, dit.dim), itemsize, models.device)
        if job.plan.sparse is not None:
            check_kernel(job.plan.sparse, models.attention, models.device, models.dit_config.head_dim, job.tokens)
        return job

    @torch.no_grad()
    def encode(self, job: Job) -> Conditioning:
        """Text, and the image if there is one, to what the denoising loop needs; of a long video, for its first
        clip."""
        text = self.encode_text(job)
        if not job.alone:
            given = given_to(self, job, job.clips[0], load_clip_media(self, job), None)
            return condition(self, job, job.clips[0], given, text)
        if job.request.image is None and job.request.last_image is None:
            return text
        seen = self.seen(job, {}, job.clips[0])
        vae = self.memory.fetch("vae", self.models.vae)
        with self.report.phase("encode image"):
            inputs = family_of(job.task).clip_inputs(job.task, vae, seen, self.first_frames(job), job.clips[0])
        return replace(text, **inputs)

    def first_frames(self, job: Job) -> dict[str, Tensor]:
        """The known first and last frame [1, 3, 1, H, W] in -1..1 on the device, by field of the request."""
        size, paths = (job.width, job.height), {"image": job.request.image, "last_image": job.request.last_image}
        found = {field: self._image(path, size) for field, path in paths.items()}
        return {field: frame for field, frame in found.items() if frame is not None}

    @torch.no_grad()
    def encode_text(self, job: Job) -> Conditioning:
        """The prompts, and that of the driving video."""
        ranks, rows, counts = self.models.ranks, None, None
        named = {"prompt": job.request.prompt}
        if job.plan.reads_negative:
            named["negative prompt"] = job.negative_prompt
        if job.pose_prompt not in (None, job.request.prompt):
            named["pose prompt"] = job.pose_prompt
        prompts = list(named.values())

        def encode() -> tuple[Tensor, list[TokenCount]]:
            encoder = self.memory.fetch("text encoder", self.models.text_encoder)
            with self.report.phase("text"):
                return encoder.encode(prompts), [encoder.tokenizer.count(prompt) for prompt in prompts]

        if ranks is None or ranks.rank == text_rank(ranks):
            rows, counts = retried(encode, partial(self.memory.relieve, "text_encoder"))
        with self.report.phase("text"):
            rows = rows_of_all(ranks, rows)
            self.note_prompts(named, counts_of_all(ranks, counts, len(prompts)))
        self.models.wait_for_kernels(self.report)  # what encodes pictures has no memory beside it
        each = dict(zip(named, rows.split(1), strict=True))
        pose = {} if job.pose_prompt is None else {"pose_context": each.get("pose prompt", each["prompt"])}
        return Conditioning(cond=each["prompt"], uncond=each.get("negative prompt"), inputs=pose)

    @torch.no_grad()
    def encode_video(self, job: Job) -> Tensor | None:
        """The un-normalised latents [1, C, T, Y, X] that video-to-video starts from; None where noise alone does."""
        if job.request.from_video is None:
            return None
        vae = self.memory.fetch("vae", self.models.vae)
        with self.report.phase("encode video"):
            frames = load_video(job.request.from_video, (job.width, job.height), job.frames)
            return encode_images(vae, frames.to(self.models.device))

    def note_prompts(self, prompts: Mapping[str, str], counts: Sequence[TokenCount]) -> None:
        """Say what was cut, or is not read as it may be meant."""
        for (name, text), count in zip(prompts.items(), counts, strict=True):
            for note in prompt_notes(name, text, count):
                self.warn(note)

    def warn(self, note: str) -> None:
        """A note of the report that a user should see before the run."""
        self.report.warn(note)
        if self.models.ranks is None or self.models.ranks.rank == 0:
            log.warning("%s", note)

    def seen(self, job: Job, media: Mapping[str, Tensor], clip: Clip) -> dict[str, Tensor]:
        """CLIP features [1, N, C] of the pictures that the family has CLIP look at for a clip. media: of `given_to`."""
        known = partial(self._image, job.request.image or job.request.last_image)
        pictures = family_of(job.task).pictures_seen(job.task, media, clip, known)
        return {name: self.features(picture) for name, picture in pictures.items()}

    def features(self, frame: Tensor) -> Tensor:
        """CLIP features [1, N, C] of a frame [1, 3, 1, H, W] in -1..1."""
        encoder = self.memory.fetch("CLIP vision encoder", self.models.clip_vision)
        with self.report.phase("encode image"):
            return encoder(frame[:, :, 0])

    def _image(self, path: str | None, size: tuple[int, int] | None = None) -> Tensor | None:
        """[1, 3, 1, H, W] in -1..1 on the device, resized and cropped to `size` (width, height) if it is given."""
        if path is None:
            return None
        pixels = torch.tensor(load_image(path, size))  # [H, W, 3]
        return pixels_to_video(pixels[None]).to(self.models.device)

    @torch.no_grad()
    def sample(
        self,
        job: Job,
        conditioning: Conditioning,
        on_step: OnStep | None = None,
        checks: BlockChecks | None = None,
        latents: Tensor | None = None,
        clip: int = 0,
    ) -> Tensor:
        """Un-normalised latents float32 [1, C, T, Y, X] on the device. latents: that the run starts from. clip: of a
        long video."""
        models = self.models

        start = job.start(latents, clip)
        return sample_latents(
            job.plan,
            self.memory,
            conditioning,
            start.sample(job.plan, models.vae_config, models.device),
            models.vae_config,
            self.report,
            start=start,
            batched=job.batched,
            on_step=on_step,
            checks=checks,
            ranks=models.ranks,
        )


@dataclass(frozen=True)
class CheckedRequest:
    """A request checked against the headers of its files. options: with what it asks of the embedded model."""

    options: LoadOptions
    models: Parts
    job: Job


def check_request(options: LoadOptions, request: Request, device: torch.device) -> CheckedRequest:
    """Find the models of `request` and check it, before any weights are read. Raises what loading and `generate` on
    `device` would refuse: CheckpointError, OptionError or AttentionError."""
    options = for_request(options, request)
    found = find_models(options, image=bool(request.image or request.last_image))
    files = found.of["high"].path, found.low_path, lora_files(options.loras)
    job = make_job(request, found.task, found.dit, found.vae, *files)
    if job.plan.sparse is not None and job.plan.sparse.kernel != "auto":
        head_dim, dtype = found.dit.head_dim, compute_dtype(options.precision, device)
        attention, _ = resolve_attention(options.attention, device, dtype, head_dim)
        check_kernel(job.plan.sparse, attention, device, head_dim, job.tokens)
    return CheckedRequest(options, found, job)


def metadata(settings: Mapping[str, Any]) -> dict[str, str]:
    """What goes into a video file: the settings that made it, as text."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}

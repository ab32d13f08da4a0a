"""A prompt becomes a video: load, encode, denoise, decode, on one screen.

    pipe = Pipeline.load(LoadOptions(model="tiny"))
    result = pipe.generate(Request(prompt="a red circle moving right on a blue background", seed=1))

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wan_core.conditioning import Conditioning, draw_noise, first_latent, image_channels, size_for_image
from wan_core.config import LoadOptions, OptionError, Request, check_size
from wan_core.denoise import Progress, choose_batched, denoise
from wan_core.latents import save_latents
from wan_core.model import WanModel
from wan_core.models import Models, choose_device, load_models
from wan_core.plan import Expert, Plan, make_plan
from wan_core.report import Report, StepClock
from wan_core.vae import TileSpec, VideoVAE
from wan_core.video import load_image

OnStep = Callable[[Progress, float | None], None]
"""Called after every step with what was done and the seconds of the newest finished step (None before the first has)."""


@dataclass(frozen=True)
class Result:
    """`frames` uint8 [F, H, W, 3]; `latents` un-normalised float32 [1, C, T, Y, X] on the CPU."""

    frames: np.ndarray
    latents: Tensor
    fps: int
    plan: Plan
    report: Report


@dataclass(frozen=True)
class Job:
    """A request with every blank filled in and every number checked against the loaded models."""

    request: Request
    plan: Plan
    width: int
    height: int
    frames: int
    fps: int
    batched: bool


class Pipeline:
    """The models of one task, ready to generate. Build it with `Pipeline.load`."""

    def __init__(self, models: Models, report: Report) -> None:
        self.models = models
        self.report = report

    @classmethod
    def load(cls, options: LoadOptions, *, image: bool = False) -> Pipeline:
        """Load the models. `image`: a first frame will be given. Raises CheckpointError or OptionError before any work."""
        report = Report(choose_device(options.device))
        with report.phase("load"):
            models = load_models(options, report, image=image)
        return cls(models, report)

    @torch.no_grad()
    def generate(
        self,
        request: Request,
        *,
        on_step: OnStep | None = None,
        on_phase: Callable[[str], None] = lambda _: None,
        keep_latents: Path | None = None,
    ) -> Result:
        """Make one video. Finished latents are written to `keep_latents` before they are decoded, and stay there."""
        job = self.prepare(request)
        on_phase("text")
        conditioning = self.encode(job)
        on_phase("denoise")
        latents = self.sample(job, conditioning, on_step)
        if keep_latents is not None:
            save_latents(keep_latents, latents, job.fps, self.report.settings)
        on_phase("decode")
        frames = self.decode(latents)
        return Result(frames, latents.cpu(), job.fps, job.plan, self.report)

    def prepare(self, request: Request) -> Job:
        """Fill in what the request leaves open and check all of it. Raises OptionError."""
        task, vae, dit = self.models.task, self.models.vae_config, self.models.dit_config
        plan = make_plan(
            task=task.name,
            steps=request.steps,
            shift=request.shift,
            boundary=request.boundary,
            guidance_high=request.guidance_high,
            guidance_low=request.guidance_low,
            solver=request.solver,
        )
        self._check_images(request)
        multiple = vae.spatial_stride * dit.patch_size[1]
        width, height = request.width or task.width, request.height or task.height
        if request.width is None and request.image is not None:
            rows, columns = load_image(request.image).shape[:2]
            width, height = size_for_image(columns, rows, task.width * task.height, multiple)
        frames = request.frames or task.frames
        check_size(width, height, frames, multiple=multiple, temporal=vae.temporal_stride)
        tokens = ((frames - 1) // vae.temporal_stride + 1) * (height // multiple) * (width // multiple)
        device, swapped = self.models.device, self.models.residency.policy == "swap"
        batched, why = choose_batched(request.guidance_mode, plan, tokens, device, streamed=False)
        job = Job(request, plan, width, height, frames, request.fps or task.fps, batched)
        self._describe(job, tokens, swapped)
        self.report.notes.append(f"guidance: {'batched' if batched else 'sequential'} ({why})")
        return job

    def _check_images(self, request: Request) -> None:
        task, given = self.models.task, request.image or request.last_image
        if self.models.dit_config.in_channels == 36 and not given:
            raise OptionError(f"{task.name} turns an image into a video: give --image (and optionally --last-image)")
        if given and self.models.dit_config.in_channels == 16:
            raise OptionError(f"{task.name} takes no image: leave --image out, or load an image-to-video model")
        if request.last_image and self.models.dit_config.in_channels != 36:
            raise OptionError(f"{task.name} takes a first frame only: leave --last-image out")

    def encode(self, job: Job) -> Conditioning:
        """Text, and the image if there is one, to what the denoising loop needs."""
        request, task = job.request, self.models.task
        negative = task.negative_prompt if request.negative_prompt is None else request.negative_prompt
        with self.report.phase("text"):
            prompts = [request.prompt, negative] if job.plan.guided else [request.prompt]
            rows = self.models.text_encoder().encode(prompts)
            cond, uncond = rows[:1], rows[1:] if job.plan.guided else None
        if request.image is None and request.last_image is None:
            return Conditioning(cond=cond, uncond=uncond)
        with self.report.phase("encode image"):
            vae = self.models.vae()
            first, last = (self._image(path, job) for path in (request.image, request.last_image))
            if self.models.dit_config.in_channels == 36:
                return Conditioning(cond=cond, uncond=uncond, concat=image_channels(vae, first, last, job.frames))
            assert first is not None
            return Conditioning(cond=cond, uncond=uncond, known=first_latent(vae, first))

    def _image(self, path: str | None, job: Job) -> Tensor | None:
        """[1, 3, 1, H, W] in -1..1 on the device, resized and cropped to the job's size."""
        if path is None:
            return None
        pixels = torch.from_numpy(load_image(path, (job.width, job.height))) * 2 - 1  # [H, W, 3]
        return pixels.permute(2, 0, 1)[None, :, None].to(self.models.device)

    def sample(self, job: Job, conditioning: Conditioning, on_step: OnStep | None = None) -> Tensor:
        """Un-normalised latents float32 [1, C, T, Y, X] on the device."""
        vae, device, clock = self.models.vae_config, self.models.device, StepClock(self.report)
        stride = vae.spatial_stride
        size = ((job.frames - 1) // vae.temporal_stride + 1, job.height // stride, job.width // stride)
        noise = draw_noise(job.request.seed, (1, vae.z_dim, *size)).to(device)

        def acquire(expert: Expert) -> WanModel:
            if self.models.residency.policy == "resident":
                model = self.models.expert(expert)
            else:
                with self.report.phase(f"fetch {expert}"):
                    model = self.models.expert(expert)
            clock.begin()
            return model

        def note(progress: Progress) -> None:
            clock.step(progress.step.expert)
            if on_step is not None:
                on_step(progress, clock.seconds_per_step())

        latents = denoise(job.plan, acquire, conditioning, noise, batched=job.batched, on_step=note)
        clock.finish()
        return self.models.vae().denormalise(latents)

    def decode(self, latents: Tensor) -> np.ndarray:
        """Un-normalised latents [1, C, T, Y, X] -> uint8 frames [F, H, W, 3]."""
        return decode_latents(self.models.vae(), latents, self.report)

    def _describe(self, job: Job, tokens: int, swapped: bool) -> None:
        request, plan = job.request, job.plan
        guidance = {e: next(s.guidance for s in plan.steps if s.expert == e) for e in plan.experts}
        self.report.settings.update(
            task=plan.task,
            prompt=request.prompt,
            negative_prompt=self.models.task.negative_prompt if request.negative_prompt is None else request.negative_prompt,
            size=[job.width, job.height],
            frames=job.frames,
            fps=job.fps,
            tokens=tokens,
            steps=len(plan.steps),
            shift=plan.shift,
            boundary=plan.boundary,
            guidance=guidance,
            guidance_mode="batched" if job.batched else "sequential",
            solver=plan.solver,
            seed=request.seed,
            attention=self.models.attention,
            residency="swap" if swapped else "resident",
        )
        if request.image:
            self.report.settings["image"] = request.image


@torch.no_grad()
def decode_latents(vae: VideoVAE, latents: Tensor, report: Report) -> np.ndarray:
    """Un-normalised latents [1, C, T, Y, X] -> uint8 frames [F, H, W, 3]. Out of memory: once more, in tiles."""

    def pixels(tile: TileSpec | None) -> Iterator[np.ndarray]:
        for frames in vae.decode_stream(latents, tile=tile):
            yield ((frames[0].float() + 1) * 127.5).round_().to(torch.uint8).permute(1, 2, 3, 0).cpu().numpy()

    with report.phase("decode"):
        try:
            return np.concatenate(list(pixels(None)))
        except torch.cuda.OutOfMemoryError:
            pass  # outside of the handler, whose traceback would hold the tensors of the failed try
        torch.cuda.empty_cache()
        report.notes.append("decode: the whole picture did not fit into memory, decoded in tiles")
        return np.concatenate(list(pixels(TileSpec())))


def metadata(report: Report) -> dict[str, str]:
    """What goes into a video file: the settings that made it, as text."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in report.settings.items()}

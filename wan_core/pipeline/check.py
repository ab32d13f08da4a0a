"""Check: a request with every blank filled in and every number checked against the models, before any weights are
read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wan_core.config import LoadOptions, OptionError, Request, SkipOptions
from wan_core.config.host_memory import total_bytes
from wan_core.config.table import said
from wan_core.execution.report import GIB
from wan_core.media.video import picture_size, short_video, video_facts
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import TASKS, Task, family_of
from wan_core.models.wan.families.clips import Clip, ClipRules, LongVideo
from wan_core.pipeline.embedded import unknown_to
from wan_core.pipeline.loras import lora_files
from wan_core.pipeline.model_parts import Parts
from wan_core.pipeline.settings import compute_dtype, find_attention
from wan_core.pipeline.sources import find_models, for_request
from wan_core.sampling.build import ModelFacts, build_plan, plan_request, strength
from wan_core.sampling.cache.skipping import skip_words
from wan_core.sampling.conditioning import best_size_for_image, size_for_image
from wan_core.sampling.guided import choose_batched
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.run import check_kernel
from wan_core.sampling.start import Start
from wan_core.sampling.texts import TimedText, text_of_frames

BEYOND = 2.0  # times the pixels of the largest size in training: from there on content is repeated or falls apart
# Fields of a request that reports say with what was decided of them, or in other words; all others under their names.
SAID_OTHERWISE = (
    "steps shift boundary guidance_high guidance_low solver preset motion lora_strengths prompt prompts_at "
    "negative_prompt keyframes from_video denoise clip_frames overlap match_colours width height frames fps "
    "seed guidance_mode skip"
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One video to make, in full. options, models: what `check_request` found, with what it asks of the embedded
    model; None where models are loaded."""

    options: LoadOptions | None = None
    models: Parts | None = None
    request: Request
    facts: ModelFacts
    plan: Plan
    negative_prompt: str
    width: int
    height: int
    frames: int
    fps: int

    @property
    def long(self) -> LongVideo:
        """How the video is made in clips; in one where it is not long."""
        assert self.plan.long is not None
        return self.plan.long

    @property
    def clips(self) -> tuple[Clip, ...]:
        return self.long.clips

    @property
    def task(self) -> Task:
        return self.facts.task

    def plan_with(self, skip: SkipOptions | None) -> Plan:
        """The plan of the same video with other step caching and sparse attention. Raises OptionError."""
        request = replace(self.request, skip=skip)
        return build_plan(plan_request(request, self.task, self.width, self.height, self.frames), self.facts)

    @property
    def pose_prompt(self) -> str | None:
        """What the driving video is described by; None: the family reads nothing for it."""
        return family_of(self.task).pose_prompt(self.request)

    @property
    def texts(self) -> tuple[TimedText, ...]:
        """What is encoded of the prompts: a text for the video, or for each clip that differs."""
        return tuple(dict.fromkeys(map(self.text_of, self.clips)))

    def text_of(self, clip: Clip) -> TimedText:
        return text_of_frames(self.request.prompt, self.request.prompts_at or (), clip.first, clip.first + clip.frames)

    @property
    def alone(self) -> bool:
        """Whether the video is made in one piece, and all of its latents and frames are of the video."""
        return self.clips[0].frames == self.frames and not family_of(self.task).driven and not self.rules.anchored

    @property
    def one_video(self) -> bool:
        """Whether its latents are those of one video, which a VAE decodes without anything else."""
        return self.alone or self.rules.anchored

    def check_saved(self) -> None:
        """Raise OptionError where its latents cannot be saved for a later decoding."""
        if not self.one_video:
            raise OptionError(
                f"--save-latents given, and this video is made in clips ({self.long.words(self.plan.count)}). Each is "
                "decoded with what came before it, so their latents alone give no video: leave it out. Finished clips "
                "are kept until the video is complete"
            )

    @property
    def rules(self) -> ClipRules:
        return family_of(self.task).clip_rules(self.task, bool(self.request.svi))

    def clip_shape(self, clip: Clip) -> tuple[int, int, int, int, int]:
        """The shape of the latents of one clip, [1, C, T, Y, X]."""
        B, C, T, Y, X = self.plan.latent_shape
        return B, C, T + (clip.frames - self.clips[0].frames) // 4, Y, X

    def start(self, latents: Tensor | None = None, clip: int = 0) -> Start:
        """What the run of a clip begins with. latents: un-normalised, for video-to-video."""
        *drawn, shape = (self.clip_shape(one) for one in self.clips[: clip + 1])
        if self.rules.anchored:  # as in a graph of samplers: each clip has a seed of its own
            return Start(shape=shape, seed=(self.request.seed + clip) % 2**64)
        return Start(shape=shape, seed=self.request.seed, latents=latents, drawn=tuple(drawn))

    def settings(self) -> dict[str, Any]:
        """What reports and video files say about it."""
        request, plan = self.request, self.plan
        return {
            **plan.settings(),
            "prompt": request.prompt,
            **({"prompts": {one.frame: one.text for one in request.prompts_at}} if request.prompts_at else {}),
            "negative_prompt": self.negative_prompt,
            **({} if request.from_video is None else {"video": request.from_video}),
            **({"keyframes": {one.frame: one.path for one in request.keyframes}} if request.keyframes else {}),
            **said(request, SAID_OTHERWISE.split()),
            "size": [self.width, self.height],
            "frames": self.frames,
            "fps": self.fps,
            "tokens": plan.tokens,
            **({} if self.alone else {"clips": self.long.words(plan.count)}),
            **({"match_colours": request.match_colours} if request.match_colours else {}),
            **({} if request.from_video is None else {"denoise": strength(request)}),
            **({} if request.skip is None else {"skipping": skip_words(request.skip)}),
            "seed": request.seed,
        }


Find = Callable[..., Parts]


def check_request(options: LoadOptions, request: Request, device: torch.device, find: Find = find_models) -> Job:
    """Find the models of `request` and check it, before any weights are read. Raises what loading and `generate` on
    `device` would refuse: CheckpointError, OptionError or AttentionError."""
    options = for_request(options, request)
    models = find(options, image=bool(request.pictures))
    job = replace(make_job(request, models.facts(lora_files(options.loras))), options=options, models=models)
    if job.plan.sparse is not None and job.plan.sparse.kernel != "auto":
        dit, dtype = models.dit, compute_dtype(options.precision, device)
        attention, _ = find_attention(options.attention, dit, dtype, device, job.plan.speed)
        check_kernel(job.plan.sparse, attention, device, dit.head_dim, job.plan.tokens)
    return job


def make_job(request: Request, facts: ModelFacts) -> Job:
    """Fill in what `request` leaves open and check all of it. Raises OptionError. A curve may lie beside the files."""
    task, vae = facts.task, facts.vae
    assert facts.dit is not None
    if request.from_video is not None:
        strength(request)
    family_of(task).check_request(request, task)
    width, height, frames, fps = size_of_video(request, task, facts.dit, vae)
    plan = build_plan(plan_request(request, task, width, height, frames), facts)
    if request.match_colours and plan.long is not None and len(plan.long.clips) == 1:
        raise OptionError(
            f"--match-colours {request.match_colours:g} given for a video that is made in one piece: it is for clips "
            "(--clip-frames, --svi). Leave it out"
        )
    batched, _ = choose_batched(request.guidance_mode, plan, plan.tokens, streamed=False)
    plan = replace(
        plan,
        guidance_mode="batched" if batched else "sequential",
        image=bool(request.pictures) or family_of(task).driven,
        seconds=0.0 if request.audio is None else frames / fps,
    )
    return Job(
        request=request,
        facts=facts,
        plan=plan,
        negative_prompt=task.negative_prompt if request.negative_prompt is None else request.negative_prompt,
        width=width,
        height=height,
        frames=frames,
        fps=fps,
    )


def size_of_video(request: Request, task: Task, dit: DiTConfig, vae: VAEConfig) -> tuple[int, int, int, int]:
    """Width, height, frames and frames per second. Raises OptionError."""
    multiple = vae.spatial_stride * dit.patch_size[1]
    width, height = given(request.width, task.width), given(request.height, task.height)
    frames, fps = given(request.frames, task.frames), given(request.fps, task.fps)
    if (driven := family_of(task).video_size(request, task, multiple)) is not None:
        return driven
    first = request.image or (request.pictures[0] if request.keyframes else None)
    picture = None if first is None else picture_size(first)
    if request.from_video is not None:
        facts = video_facts(request.from_video, max(1, frames) / fps)
        picture, count = (facts.width, facts.height), min(frames, len(facts.frames_at(fps)))
        if request.frames is None:
            frames = vae.video_frames(vae.latent_frames(count))
        if count < frames:
            raise OptionError(short_video(request.from_video, count, frames, fps))
    if request.width is None and picture is not None:
        fit = size_for_image if task.image == "channels" else best_size_for_image
        width, height = fit(*picture, task.width * task.height, multiple)
    return width, height, frames, fps


def given(value: int | None, default: int) -> int:
    return default if value is None else value


def never_seen(job: Job) -> list[str]:
    """What the embedded model never saw of the prompt and the size of a job, see `unknown_to`."""
    longest = max(clip.frames for clip in job.clips)
    texts = [one.text for one in job.texts] if not job.request.prompts_at else []  # prompts of parts are read apart
    texts += [one.text for one in job.request.prompts_at or ()]
    return unknown_to(job.task, texts, job.width, job.height, longest)


def size_notes(task: Task | None, vae: VAEConfig, width: int, height: int) -> list[str]:
    """A sentence where a picture is far larger than what models whose latents are of `vae` were trained on. task: None
    where it is not known. The embedded model knows sizes of its own (`wan_core.pipeline.embedded`)."""
    if task is not None and task.release == "embedded":
        return []
    trained = [task for task in TASKS.values() if task.vae.z_dim == vae.z_dim]
    largest = max(trained, key=lambda task: task.width * task.height)
    times = width * height / (largest.width * largest.height)
    if times <= BEYOND:
        return []
    return [
        f"{width}x{height} has {times:.3g} times the pixels of {largest.width}x{largest.height}, the largest size that "
        f"models with these latents were trained on, and attention takes {times**2:.3g} times as long. Choose a "
        "smaller size, and enlarge the video afterwards"
    ]


def check_activation(shape: tuple[int, ...], itemsize: int, device: torch.device) -> None:
    """Raise OptionError where one activation of a video takes more than all memory of the device."""
    size, room = math.prod(shape) * itemsize, memory_of(device)
    if room is not None and size > room:
        raise OptionError(
            f"an activation of this video ({' x '.join(map(str, shape))}) alone would take {size / GIB:.3g} GiB of the "
            f"{room / GIB:.3g} that there are: choose a smaller size or fewer frames"
        )


def memory_of(device: torch.device) -> int | None:
    """All memory of a device in bytes, used or not; None where it is not known."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return total_bytes() if device.type == "cpu" else None

"""The one way from what a user asks for to the plan of a run.

`build_plan` plans this engine's own loop: the command line, worker processes and nodes translate what they were given
into a `PlanRequest`, and what the files say into `ModelFacts`. `build_sampler_plan` plans a run of ComfyUI's samplers
on its own models, whose sigmas are known. Both apply one list of policies, `apply_policies`. All is numbers and names,
so that a plan, or its refusal, needs no weights. Imports no torch.

Long videos of SVI 2.0 Pro (Stable Video Infinity): a clip begins with an anchor picture, the same in each, and with the
last latents of the clip before. So latents never go through pixels between clips, and what drifts is drawn back to the
anchor. Image-to-video of Wan 2.2 A14B is trained for it by a LoRA on each expert, which is known by its name or
metadata. Source: Stable-Video-Infinity, branch svi_wan22; names of files as KJNodes' and Wan2GP's users have them.

"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wan_core.config import (
    ControlOptions,
    NagOptions,
    OptionError,
    PlanNumbers,
    Request,
    SkipOptions,
    check_known,
    check_prompts,
)
from wan_core.config.checks import check_size
from wan_core.config.file_names import file_says
from wan_core.config.table import from_values
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import check_prompts_over_time, family_of
from wan_core.models.wan.families.clips import Clip, LongVideo
from wan_core.models.wan.families.family import given_fields
from wan_core.models.wan.families.task import Task
from wan_core.sampling.cache.skipping import apply_policies, for_run, skip_forwards
from wan_core.sampling.control import with_control, with_nag
from wan_core.sampling.mistakes import likely_mistakes, number_mistakes
from wan_core.sampling.motion import with_phases
from wan_core.sampling.native.plan import (
    NativeModel,
    Part,
    check_native,
    cut,
    falls,
    place,
    plan_part,
    rising_words,
    without_moving_windows,
)
from wan_core.sampling.plan import KnownFrames, Plan, PromptTimes
from wan_core.sampling.presets import motion_of, preset_plan
from wan_core.sampling.schedules import Window
from wan_core.sampling.sparsity.schedule import with_costs
from wan_core.sampling.steps import Branch

DENOISE = 0.7  # of video-to-video, where nothing is said
USUAL = "SVI_v2_PRO_Wan2.2-I2V-A14B_HIGH_lora_rank_128_fp16.safetensors and its LOW file"


def with_svi(
    plan: Plan,
    long: LongVideo,
    files: Sequence[Path],
    *,
    known: bool,
    part: Window | None,
) -> Plan:
    """`plan` of a clip with what each is given, and notes of the LoRAs. files: all of them, if these are known. Raises
    OptionError for what an anchored clip cannot have."""
    releases = {file.name: file_says(file).svi for file in files}
    pro = [name for name, release in releases.items() if release == "2.0 Pro"]
    if not long.anchored:
        told = len(long.clips) > 1 and pro
        note = f"LoRA {pro[0]} is of SVI 2.0 Pro, whose clips --svi makes; these are not" if told else ""
        return replace(plan, notes=(*plan.notes, note)) if note else plan
    for given, what in ((part, "a part of the schedule"), (plan.known, "keyframes")):
        if given is not None:
            raise OptionError(f"--svi and {what} given: its clips begin with an anchor picture alone. Leave one out")
    carried, frames = long.clips[-1].carried, long.clips[0].frames
    plan = replace(plan, known=KnownFrames((0,), frames, handed=tuple(range(1, carried))))
    others = [name for name, release in releases.items() if release == "another"]
    notes = [f"LoRA {name} is of another SVI than 2.0 Pro" for name in others]
    if known and not pro:
        notes.append(f"no LoRA is SVI 2.0 Pro's by its name or metadata, and without it clips drift: give {USUAL}")
    return replace(plan, notes=(*plan.notes, *notes))


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a plan depends on of the models: names of files and numbers of their headers, no tensors.

    dit: None where only the task is known. high: the high-noise expert, or the only transformer. all_files: a
    run has no other files; so it is where one of them is given.
    """

    task: Task
    dit: DiTConfig | None
    vae: VAEConfig
    high: Path | None = None
    low: Path | None = None
    loras: tuple[Path, ...] = ()
    all_files: bool = False

    @property
    def known(self) -> bool:
        """Whether the files of the run are known, and not its task alone."""
        return self.all_files or self.high is not None or bool(self.loras)


@dataclass(frozen=True, kw_only=True)
class PlanRequest(PlanNumbers):
    """What a user asked for that decides steps, forwards and clips. Sizes are pixels, None the task's.

    sigmas: a schedule in place of steps and shift. part: the steps of the schedule that run. image: the video starts
    from one. frames: of the whole video. cut: it is made in clips where it is longer than one; False: it is one clip.
    from_noise: neither a last picture nor a video is given. front: latent frames before those of the video, beside
    those of its family. beside: frames of tokens that the transformer adds. known, handed: video frames
    that are known pictures, or latents of the clip before, to be shown.
    prompt_starts: video frames at which prompts of parts of the video begin.
    """

    sigmas: Sequence[float] | None = None
    part: Window | None = None
    skip: SkipOptions | None = None
    nag: NagOptions | None = None
    control: ControlOptions | None = None
    image: bool = False
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    clip_frames: int | None = None
    overlap: int | None = None
    svi: bool | None = None
    cut: bool = True
    from_noise: bool = True
    front: int = 0
    beside: int = 0
    known: tuple[int, ...] = ()
    handed: tuple[int, ...] = ()
    prompt_starts: tuple[int, ...] = ()


def plan_request(
    request: Request, task: Task, width: int | None, height: int | None, frames: int, part: Window | None = None
) -> PlanRequest:
    """What of a request decides its plan. width, height: None for the task's own. part: the steps that run, where the
    request has no video to start from. Raises OptionError if nothing of such a video would remain."""
    family = family_of(task)
    if request.from_video is not None:
        part = Window(denoise=strength(request))
    return from_values(
        PlanRequest,
        vars(request),
        part=part,
        image=request.image is not None,
        width=width,
        height=height,
        frames=frames,
        from_noise=request.last_image is None and (part is None or part.denoise == 1),
        known=request.known_frames(frames),
        prompt_starts=request.prompt_starts,
        front=len(given_fields(request, family.front)),
        beside=len(given_fields(request, family.beside)),
    )


def strength(request: Request) -> float:
    """The denoise strength of video-to-video. Raises OptionError if nothing of the video would remain."""
    denoise = DENOISE if request.denoise is None else request.denoise
    if denoise >= 1:
        raise OptionError("denoise 1 given, with which nothing of the video stays: use less, or leave the video out")
    return denoise


@dataclass(frozen=True, kw_only=True)
class SamplerRequest:
    """A run of one of ComfyUI's samplers, with what a WanCore node asks of it.

    sigmas: one more than steps. whole_steps: of the run of which it walks a part; 0: not known. skip: `sparse` among
    it, as the model carries it. windows: the name of the schedule of ComfyUI's context windows. image: it starts from
    one (5B).
    """

    sigmas: tuple[float, ...]
    whole_steps: int = 0
    solver: str
    guidance: float
    branches: tuple[Branch, ...]
    skip: SkipOptions
    windows: str | None = None
    image: bool = False


def build_plan(request: PlanRequest, facts: ModelFacts) -> Plan:
    """The plan of what is asked for, with its clips and sizes, and every check that needs no weights. Raises
    OptionError.

    The order is that of the refusals, and of the changes to the plan: sizes, sparse attention, guidance and step caches
    (`skip_forwards`) before what only some steps may have.
    """
    task = facts.task
    plan = schedule(request, facts)
    files = [file_says(path) for path in (facts.high, facts.low) if path is not None]
    loras = [file_says(path) for path in facts.loras]
    plan = replace(plan, warnings=likely_mistakes(plan, task, files, loras, facts.all_files))
    frames = task.frames if request.frames is None else request.frames
    check_known(request.known, frames)
    plan = replace(plan, known=KnownFrames(request.known, frames, request.handed)) if request.known else plan
    if request.prompt_starts:
        check_prompts_over_time(task)
        check_prompts(request.prompt_starts, frames)
        plan = replace(plan, prompts=PromptTimes(request.prompt_starts, frames))
    plan = skip_forwards(plan, request.skip, facts.high, facts.low, image=request.image, loras=facts.loras)
    plan = plan if request.nag is None else with_nag(plan, request.nag)
    plan = plan if request.control is None else with_control(plan, request.control)
    part = request.part
    if part is not None and part.denoise < 1 and not request.from_noise and not plan.from_latents:
        raise OptionError(
            f"denoise {part.denoise:g} of {plan.count} steps leaves nothing of the video: use less, or more steps"
        )
    long = clips_of(request, task, frames)
    plan = with_svi(plan, long, facts.loras, known=facts.known, part=request.part)
    T, Y, X = latents_of(request, facts, long)
    plan = replace(plan, long=long, latent_shape=(1, facts.vae.z_dim, T, Y, X))
    if facts.dit is None:
        return plan
    seen = T + request.beside, Y, X
    return replace(with_costs(plan, facts.dit, seen), tokens=facts.dit.tokens(*seen))


def schedule(request: PlanRequest, facts: ModelFacts) -> Plan:
    """Every step of the schedule, each with all of its forwards."""
    plan = preset_plan(
        request,
        [path for path in (*facts.loras, facts.high, facts.low) if path is not None],
        task=facts.task,
        sigmas=request.sigmas,
        window=request.part,
    )
    distilled = [path for path in facts.loras if file_says(path).steps is not None]
    motion = motion_of(request, facts.task, facts.loras)
    return with_phases(plan, motion, request.lora_strengths or (), facts.loras, distilled, facts.known)


def clips_of(request: PlanRequest, task: Task, frames: int) -> LongVideo:
    """The clips in which a video of `frames` frames is made."""
    if not request.cut:
        return LongVideo((Clip(0, 0, frames, 0),))
    ends = {"from_noise": request.from_noise, "svi": bool(request.svi)}
    long = family_of(task).cut_video(task, frames, request.clip_frames, request.overlap, **ends)
    return replace(long, leading=long.leading + request.front)


def latents_of(request: PlanRequest, facts: ModelFacts, long: LongVideo) -> tuple[int, int, int]:
    """Frames, rows and columns of the latents of the longest clip, checked."""
    task, vae = facts.task, facts.vae
    width = task.width if request.width is None else request.width
    height = task.height if request.height is None else request.height
    multiple = vae.spatial_stride * (1 if facts.dit is None else facts.dit.patch_size[1])
    longest = long.clips[0].frames
    check_size(width, height, longest, multiple=multiple, temporal=vae.temporal_stride)
    T = vae.latent_frames(longest) + long.leading
    return T, height // vae.spatial_stride, width // vae.spatial_stride


def build_sampler_plan(request: SamplerRequest, model: NativeModel) -> tuple[Plan, Part]:
    """The plan of what a sampler runs, and where its steps are in the whole run. Raises OptionError, also where there
    is no step. Nothing is skipped where sigmas do not fall, as in inversion."""
    check_native(request.skip)
    sigmas, skip, count = request.sigmas, request.skip, len(request.sigmas) - 1
    cached = False
    if count < 1:
        raise OptionError("sigmas without a step given: no sampler runs any, connect those of one that does")
    if falls(sigmas):
        part = place(sigmas, model.shift, request.whole_steps)
    else:
        part, (skip, _) = Part(0, count, count, sigmas), for_run(skip, count, [model.path])
        cached, skip = replace(skip, sparse=None) != SkipOptions(), SkipOptions(sparse=skip.sparse)
    plan = plan_part(
        part,
        name=model.name,
        solver=f"ComfyUI {request.solver}",
        shift=model.shift,
        boundary=model.boundary if falls(sigmas) else 0.0,
        guidance=request.guidance,
        branches=request.branches,
    )
    notes, warnings = (model.note,) if model.note else (), number_mistakes(plan, model.task)
    plan = replace(plan, notes=notes, warnings=tuple(warnings))
    plan = apply_policies(plan, skip, model.path, image=request.image, of_sampler=True)
    if falls(sigmas):
        plan = cut(plan, part)
    elif cached:
        plan = replace(plan, notes=(*plan.notes, rising_words(sigmas)))
    return without_moving_windows(plan, request.windows), part

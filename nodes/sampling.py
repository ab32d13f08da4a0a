"""The sampler: a plan, walked step by step with a live preview."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest import io, ui  # pyright: ignore[reportMissingImports]
from PIL import Image
from torch import Tensor

from wan_core.checkpoint import load_vae
from wan_core.config import EXACT, OptionError, PlanNumbers, Request, SkipOptions, UserError
from wan_core.config.changes import until_changed
from wan_core.execution.report import Phase, Report
from wan_core.media.pictures import clock
from wan_core.media.preview import RGBMap
from wan_core.models.vae.tiny import TinyVAE
from wan_core.models.wan.families import family_of
from wan_core.models.wan.families.s2v import COMFYUI_POSITIONS
from wan_core.pipeline.check import size_notes
from wan_core.pipeline.comfy_conditioning import Joined, join, prompt_starts
from wan_core.pipeline.embedded import unknown_to
from wan_core.pipeline.loras import notes_of
from wan_core.pipeline.settings import compute_dtype
from wan_core.pipeline.sources import recognise
from wan_core.sampling.cache.skipping import skip_words
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import Progress
from wan_core.sampling.guided import choose_batched
from wan_core.sampling.next_speed import next_speed
from wan_core.sampling.plan import Plan
from wan_core.sampling.presets import CHOICES
from wan_core.sampling.sparsity.schedule import with_costs
from wan_core.sampling.start import Leftover, Start
from wan_core.sampling.steps import Expert

from . import host
from .memory import ModelSocket, Sampling, plan_experts
from .plan_inputs import LAST, SWITCH, check_window, plan_inputs, plan_of, read_numbers, window_inputs
from .schema import ADVANCED, output, schema, widgets
from .skipping import skipping_input
from .sockets import CONDITIONING, MODEL, REPORT

TINY_FILES = {16: ("taew2_1", "lighttaew2_1"), 48: ("taew2_2", "lighttaew2_2")}  # by latent channels


class TinyPreviews:
    """Previews of a tiny autoencoder, in place of a map of latents to colours (`RGBMap`)."""

    def __init__(self, vae: TinyVAE) -> None:
        self.vae = vae

    @torch.no_grad()
    def pictures(self, latents: Tensor) -> list[Image.Image]:
        """A picture of each latent frame of the first video of the transformer's latents [B, C, T, Y, X]."""
        pictures = (still[0, :, 0].float().clamp(-1, 1) for still in self.vae.stills(latents[:1]))
        pixels = [((one + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0) for one in pictures]
        return [Image.fromarray(one.cpu().numpy()) for one in pixels]


def previews_of(model: ModelSocket) -> TinyPreviews | RGBMap | None:
    """What draws the previews of a run of `model`; None: nothing does."""
    channels = model.experts.vae.z_dim
    path = host.preview_file(TINY_FILES.get(channels, ()))
    if path is None or not model.experts.task.release.startswith("Wan"):  # the embedded model has latents of its own
        return model.rgb
    try:
        return TinyPreviews(tiny_vae(path, channels))
    except (UserError, OSError) as fault:
        host.log.warning("WanCore: previews are those of latents: %s", fault)
        return model.rgb


@until_changed(1)
def tiny_vae(path: Path, channels: int) -> TinyVAE:
    """The tiny autoencoder in a file. Raises UserError."""
    part, device = recognise(path, "vae", load_vae), host.device()
    vae = part.load(device, compute_dtype("auto", device), None)
    if not isinstance(vae, TinyVAE) or vae.config.z_dim != channels:
        raise OptionError(f"{path} is no tiny autoencoder for latents of {channels} channels")
    host.log.info("WanCore draws previews with %s", path.name)
    return vae


REFERENCE = "reference"  # positions of motion frames
LEFTOVER = "wancore_leftover"  # of a LATENT: (Leftover, the samples that it was rounded to)


class WanCoreSampler(io.ComfyNode):
    """Noise to latents."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreSampler",
            "WanCore Sampler",
            aliases="wan sampler, ksampler, lightning, 4 steps, slow motion",
            shows_text=True,
            description="Runs both experts over the steps of a plan. Numbers left at 0 come from the model.",
            inputs=[
                MODEL.Input("model", tooltip="From the WanCore Model Loader."),
                io.Conditioning.Input("positive", tooltip="The encoded prompt, and the image if there is one."),
                io.Conditioning.Input("negative", tooltip="The encoded negative prompt; unused where guidance is 1."),
                io.Latent.Input(
                    "latent",
                    tooltip="The size of the video: an empty latent, WanCore's or ComfyUI's. For video to video: an "
                    "encoded one.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=2**64 - 1,
                    control_after_generate=True,
                    tooltip="Which noise the video starts from. It is drawn on the CPU, the same on every device.",
                ),
                *plan_inputs(),
                *widgets(Request, "guidance_mode"),
                skipping_input(),
                *widgets(PlanNumbers, "preset", preset={"options": list(CHOICES)}),
                *window_inputs(),
                io.Combo.Input(
                    "add_noise",
                    **ADVANCED,
                    options=SWITCH,
                    default="enable",
                    optional=True,
                    tooltip="Disable it for latents in which another sampler left its noise.",
                ),
                *widgets(PlanNumbers, "motion", "lora_strengths"),
                io.Combo.Input(
                    "motion_positions",
                    **ADVANCED,
                    options=[REFERENCE, "comfyui"],
                    default=REFERENCE,
                    optional=True,
                    tooltip="For S2V: where the frames before a clip, of WanSoundImageToVideo or its Extend, stand in "
                    "time and in the picture. reference: as the released model was trained. comfyui: as ComfyUI's own "
                    "sampling has them.",
                ),
                *widgets(SkipOptions, "speed"),
                # The last: workflows are saved with their values by place.
                io.Int.Input(
                    "low_from_step",
                    **ADVANCED,
                    default=0,
                    min=0,
                    max=LAST,
                    optional=True,
                    tooltip="With `sigmas`: the first step of the low-noise expert, counted from 0, as two KSampler "
                    "(Advanced) have it; more than there are means none. 0: where the boundary is.",
                ),
            ],
            outputs=[
                output(io.Latent, "latent_out", "Finished, for any VAE Decode."),
                output(REPORT, "report", "Times, memory and settings so far."),
            ],
        )

    @classmethod
    def validate_inputs(
        cls,
        denoise: float | None = 1.0,
        start_step: int | None = 0,
        end_step: int | None = LAST,
        motion: str | None = "",
        lora_strengths: str | None = "",
    ) -> bool:
        read_numbers({"motion": motion, "lora_strengths": lora_strengths})
        return check_window(denoise, start_step, end_step)

    @classmethod
    def execute(
        cls,
        model: ModelSocket,
        positive: CONDITIONING,
        negative: CONDITIONING,
        latent: dict[str, Any],
        seed: int,
        guidance_mode: str = "auto",
        skipping: SkipOptions | None = None,
        add_noise: str = "enable",
        motion_positions: str = REFERENCE,
        **values: Any,
    ) -> io.NodeOutput:
        if motion_positions != REFERENCE:
            positive = with_comfyui_positions(model, positive)
        frames = model.experts.vae.video_frames(latent["samples"].shape[2])
        starts = prompt_starts(positive)

        def planned(speed: str) -> Plan:
            own = values | {"speed": speed}
            return plan_of(model, own, skipping, "noise_mask" in latent, frames=frames, prompt_starts=starts)

        plan = planned(values.get("speed", EXACT))
        model = model.at_speed(plan.speed)
        model.check(plan, tuple(latent["samples"].shape))
        joined = join(positive, negative, latent, model.experts, plan, model.range_shift)
        plan, here = joined.plan, host.device()
        conditioning = Conditioning.of({name: rows.to(here) for name, rows in joined.conditioning.flat().items()})
        start = _start(latent, joined.latents, seed, add_noise)
        start.check(plan)
        shape = start.shape
        T, Y, X = shape[2:]
        tokens = model.experts.dit.tokens(T, Y, X)
        plan = with_costs(plan, model.experts.dit, (T, Y, X))
        plan = replace(plan, latent_shape=shape, tokens=tokens, text_rows=conditioning.text_rows)
        blocks = plan_experts(model, plan).staying_blocks
        batched, why = choose_batched(guidance_mode, plan, tokens, blocks is not None, conditioning.separate)
        plan = replace(plan, guidance_mode="batched" if batched else "sequential")
        settings = _settings(model, plan, seed)
        if skipping is not None:
            settings["skipping"] = skip_words(skipping)
        settings["speed"] = values.get("speed", EXACT)
        report = Report(host.device(), settings)
        warnings = [*plan.warnings, *unknown_of(model, joined, shape), *joined.notes]
        of_files = [*model.experts.notes, *notes_of(model.loras)]
        for warning in warnings:
            report.warn(warning)
        report.warnings += of_files
        notes = [f"guidance: {plan.guidance_mode} ({why})", *of_files]
        if blocks is not None:
            notes.append(f"memory: {blocks} of {model.experts.dit.num_layers} blocks stay, the others stream")
        shown = report.warning_lines()
        if shown or plan.notes:
            host.reporter()("\n".join([*shown, *plan.notes]))
        report.phases["text"] = Phase(joined.seconds)
        if model.settings.options.compile != "off" and not model.pace:
            host.show("compiling in the first step ...")
        run = Sampling(plan, conditioning, start, report, notes)
        samples, leftover = _sample(model, run, shown)
        lines = [*shown, plan.table().splitlines()[0], f"done in {clock(report.total_seconds)}"]
        if skipping is None:
            costs = partial(with_costs, config=model.experts.dit, latents=(T, Y, X))
            speed = values.get("speed", EXACT)
            lines.append(next_speed(plan, speed, lambda word: costs(planned(word)), model.pace))
        output: dict[str, Any] = {"samples": samples}
        if leftover is not None:
            output |= {key: latent[key] for key in ("noise_mask", "batch_index") if key in latent}
            output[LEFTOVER] = leftover, samples
        return io.NodeOutput(output, report, ui=ui.PreviewText("\n".join(filter(None, lines))))


def with_comfyui_positions(model: ModelSocket, positive: CONDITIONING) -> CONDITIONING:
    """`positive` with ComfyUI's positions of motion frames. Raises OptionError for a model that has no such frames."""
    if COMFYUI_POSITIONS not in family_of(model.experts.dit).conditioning_keys:
        name = model.experts.task.name
        raise OptionError(f"motion_positions 'comfyui' is for S2V, and this model is {name}: set it to {REFERENCE!r}")
    return [[rows, {**extras, COMFYUI_POSITIONS: True}] for rows, extras in positive]


def _start(latent: dict[str, Any], latents: Tensor | None, seed: int, add_noise: str) -> Start:
    """What the run begins with. latents: those of `latent`, where they are not empty."""
    samples, leftover = latent["samples"], None
    if latents is not None and LEFTOVER in latent:
        last, rounded = latent[LEFTOVER]
        leftover = last if rounded.shape == samples.shape and bool((rounded == samples).all()) else None
    index = latent.get("batch_index")
    return Start(
        shape=tuple(samples.shape),
        seed=seed,
        batch_index=None if index is None else tuple(int(one) for one in index),
        add_noise=add_noise == "enable",
        latents=latents,
        leftover=leftover,
    )


def _sample(model: ModelSocket, run: Sampling, warnings: Sequence[str]) -> tuple[Tensor, Leftover | None]:
    """Un-normalised latents where ComfyUI keeps them, and what another run can go on with. warnings: shown meanwhile,
    above the step."""
    leftovers: list[Leftover] = []
    with closing(Watcher(model, run.plan, warnings)) as watcher:
        latents = model.sample(run, watcher, leftovers.append)
    model.pace.clear()
    for expert, forwards in watcher.forwards.items():  # where ranks run different steps, the first one's experts alone
        model.pace[expert] = run.report.phases[f"denoise {expert}"].seconds / forwards
    intermediate = host.to_intermediate(latents)
    return intermediate, leftovers[0].to(intermediate.device) if leftovers else None


def _settings(model: ModelSocket, plan: Plan, seed: int) -> dict[str, Any]:
    """What reports and latents say of the run."""
    config, shape = model.experts.vae, plan.latent_shape
    return {
        **replace(model.settings, loras=model.loras if model.lora_files else {}).describe(),
        "size": [shape[4] * config.spatial_stride, shape[3] * config.spatial_stride],
        "frames": config.video_frames(shape[2]),
        **({"sigmas": [plan.sigmas[0], plan.sigmas[-1]]} if plan.from_latents or plan.sigmas[-1] else {}),
        **({"nag": plan.nag.words()} if plan.nag else {}),
        **plan.settings(),
        "seed": seed,
        "attention": model.settings.attention,
        "residency": model.options.residency,
    }


def unknown_of(model: ModelSocket, joined: Joined, shape: tuple[int, ...]) -> list[str]:
    """What the model is asked for and never saw. shape: of the latents, [B, C, T, Y, X]."""
    task, vae = model.experts.task, model.experts.vae
    rules = family_of(task).clips
    leading = rules.leading  # of a reference
    latents = shape[2] - leading
    width, height = shape[4] * vae.spatial_stride, shape[3] * vae.spatial_stride
    unknown = unknown_to(task, joined.prompts, width, height, vae.video_frames(latents))
    return [*unknown, *size_notes(task, vae, width, height)]


class Watcher:
    """After every step: the preview, the bar and how long the rest will take. Raises where the user interrupts.
    `forwards`: that ran, which a plan that decides while running does not know, each as the part that it costs.
    warnings: lines that stay above."""

    def __init__(self, model: ModelSocket, plan: Plan, warnings: Sequence[str] = ()) -> None:
        self.warnings = warnings
        self.forwards: dict[Expert, float] = defaultdict(float)
        self.previews = previews_of(model)
        self.frames_per_second = model.experts.task.fps / model.experts.vae.temporal_stride
        self.progress = host.Progress(plan.count)

    def __call__(self, progress: Progress, seconds: float | None) -> None:
        step, plan = progress.step, progress.plan
        done, total = plan.number(step), plan.count
        self.forwards[step.expert] += progress.forwards * step.cost
        each = 0.0 if seconds is None else seconds * len(step.branches) * step.cost
        remaining = "" if seconds is None else f", {each:.3g} s a step, {clock(progress.left(seconds))} left"
        pictures = self.previews.pictures(progress.preview()) if self.previews else []
        line = f"step {done} of {total}, {step.expert}-noise expert{remaining}"
        self.progress.update(done, total, "\n".join([*self.warnings, line]), pictures, self.frames_per_second)

    def close(self) -> None:
        self.progress.close()

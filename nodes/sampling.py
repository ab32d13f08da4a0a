"""The sampler: a plan, walked step by step with a live preview."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from comfy_api.latest import io, ui
from torch import Tensor

from wan_core.config import Request, SkipOptions
from wan_core.execution.memory.planning import TRANSFER_TOKENS
from wan_core.execution.report import Phase, Report
from wan_core.media.pictures import clock
from wan_core.pipeline.check import check_tensor
from wan_core.pipeline.comfy_conditioning import join
from wan_core.pipeline.denoise import sample_latents
from wan_core.pipeline.loras import notes_of
from wan_core.pipeline.memory_planning import Workload
from wan_core.sampling.cache.skipping import skip_words
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.control import nag_words
from wan_core.sampling.denoise import choose_batched
from wan_core.sampling.pace import BlockChecks
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.run import check_kernel
from wan_core.sampling.sparsity.schedule import with_costs
from wan_core.sampling.start import Leftover, Start

from . import host
from .conditioning import on_device
from .files import name_of
from .plan_inputs import LAST, SWITCH, check_window, plan_inputs, plan_of, preset_input, window_inputs
from .schema import schema, widgets
from .sockets import CONDITIONING, MODEL, REPORT, SKIPPING, ComfyMemory, ModelSocket
from .watching import Watcher, unknown_of

LEFTOVER = "wancore_leftover"  # of a LATENT: (Leftover, the samples that it was rounded to)


class WanCoreSampler(io.ComfyNode):
    """Noise to latents."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreSampler",
            "WanCore Sampler",
            aliases=("wan fast", "wan sampler", "ksampler", "wan 2.2", "lightning", "4 steps", "speed"),
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
                    tooltip="Which noise to start from; drawn on the CPU, so that it means the same on every device.",
                ),
                *plan_inputs(),
                *widgets(Request, "guidance_mode"),
                SKIPPING.Input(
                    "skipping",
                    optional=True,
                    tooltip="Which forwards need not run, from WanCore MagCache and its like. Nothing connected: every "
                    "one runs.",
                ),
                *preset_input(),
                *window_inputs(),
                io.Combo.Input(
                    "add_noise",
                    options=SWITCH,
                    default="enable",
                    optional=True,
                    tooltip="Disable it for latents in which another sampler left its noise.",
                ),
            ],
            outputs=[
                io.Latent.Output("latent_out", display_name="latent", tooltip="Finished, for any VAE Decode."),
                REPORT.Output("report", display_name="report", tooltip="Times, memory and settings so far."),
            ],
        )

    @classmethod
    def validate_inputs(
        cls, denoise: float | None = 1.0, start_step: int | None = 0, end_step: int | None = LAST
    ) -> bool:
        return check_window(denoise, start_step, end_step)

    @classmethod
    def execute(
        cls,
        model: ModelSocket,
        positive: CONDITIONING,
        negative: CONDITIONING,
        latent: dict[str, Any],
        seed: int,
        guidance_mode: str,
        skipping: SkipOptions | None = None,
        add_noise: str = "enable",
        **values: Any,
    ) -> io.NodeOutput:
        frames = model.experts.vae.temporal_stride * (latent["samples"].shape[2] - 1) + 1
        video = plan_of(model, values, skipping, "noise_mask" in latent, frames=frames)
        shape, dit = tuple(latent["samples"].shape), model.experts.dit
        if model.workers is None and len(shape) == 5:  # before anything of this size is made
            seen = max(video.plan.window_sizes(shape[2]))
            activation = shape[0] * dit.tokens(seen, *shape[3:]), dit.dim
            check_tensor("an activation", activation, model.settings.dtype.itemsize, host.device())
        joined = join(positive, negative, latent, model.experts, video.plan, model.range_shift)
        plan, conditioning = joined.plan, on_device(joined.conditioning)
        start = _start(latent, joined.latents, seed, add_noise)
        start.check(plan)
        shape = start.shape
        sizes, area = plan.window_sizes(shape[2]), shape[3:]
        tokens = model.experts.dit.tokens(max(sizes), *area)
        plan = with_costs(plan, model.experts.dit, (max(sizes), *area))
        if plan.sparse is not None and model.workers is None:
            check_kernel(plan.sparse, model.settings.attention, host.device(), model.experts.dit.head_dim, tokens)
        workload = Workload(shape, plan, batched=False)
        blocks = model.plan(workload).staying_blocks
        streamed = blocks is not None and tokens <= TRANSFER_TOKENS
        batched, why = choose_batched(guidance_mode, plan, tokens, streamed=streamed)
        settings = _settings(model, plan, shape, seed, batched)
        if skipping is not None:
            settings["skipping"] = skip_words(skipping)
        report = Report(host.device(), settings)
        warnings = [*unknown_of(model, joined, shape), *joined.notes]
        of_files = [*model.experts.notes, *notes_of(model.loras)]
        report.notes += warnings
        report.warnings += [*warnings, *of_files]
        if model.workers is None:  # they say what holds there
            report.notes += [f"guidance: {'batched' if batched else 'sequential'} ({why})", *of_files]
        shown = report.warning_lines()
        if shown or plan.notes:
            host.reporter()("\n".join([*shown, *plan.notes]))
        report.phases["text"] = Phase(joined.seconds)
        if blocks is not None and model.workers is None:
            report.notes.append(f"memory: {blocks} of {model.experts.dit.num_layers} blocks stay, the others stream")
        if model.settings.compile != "off" and not model.pace:
            host.show("compiling in the first step ...")
        samples, left = _sample(model, replace(workload, batched=batched), conditioning, start, report, shown)
        words = "\n".join([*shown, plan.table().splitlines()[0], f"done in {clock(report.total_seconds)}"])
        made: dict[str, Any] = {"samples": samples}
        if left is not None:
            made |= {key: latent[key] for key in ("noise_mask", "batch_index") if key in latent}
            made[LEFTOVER] = left, samples
        return io.NodeOutput(made, report, ui=ui.PreviewText(words))


def _start(latent: dict[str, Any], latents: Tensor | None, seed: int, add_noise: str) -> Start:
    """What the run begins with. latents: those of `latent`, where they are not empty."""
    samples, leftover = latent["samples"], None
    if latents is not None and LEFTOVER in latent:
        found, rounded = latent[LEFTOVER]
        leftover = found if rounded.shape == samples.shape and bool((rounded == samples).all()) else None
    index = latent.get("batch_index")
    return Start(
        shape=tuple(samples.shape),
        seed=seed,
        batch_index=None if index is None else tuple(int(one) for one in index),
        add_noise=add_noise == "enable",
        latents=latents,
        leftover=leftover,
    )


def _sample(
    model: ModelSocket,
    workload: Workload,
    conditioning: Conditioning,
    start: Start,
    report: Report,
    warnings: Sequence[str],
) -> tuple[Tensor, Leftover | None]:
    """Un-normalised latents where ComfyUI keeps them, and what another run can go on with. warnings: shown meanwhile,
    above the step."""
    plan, batched, left = workload.plan, workload.batched, list[Leftover]()
    with closing(Watcher(model, plan, warnings)) as watcher:
        if model.workers is not None:
            latents = model.workers.sample(model, workload, conditioning, start, report, watcher, left.append)
        else:
            latents = sample_latents(
                plan,
                ComfyMemory(model, workload, report),
                conditioning,
                start.sample(plan, model.experts.vae, host.device()),
                model.experts.vae,
                report,
                start=start,
                batched=batched,
                on_step=watcher,
                on_leftover=left.append,
                checks=BlockChecks(host.check_interruption),
            )
    model.pace.clear()
    for expert, forwards in watcher.forwards.items():  # where ranks run different steps, the first one's experts alone
        model.pace[expert] = report.phases[f"denoise {expert}"].seconds / forwards
    intermediate = host.to_intermediate(latents)
    return intermediate, left[0].to(intermediate.device) if left else None


def _settings(model: ModelSocket, plan: Plan, shape: tuple[int, ...], seed: int, batched: bool) -> dict[str, Any]:
    config, settings = model.experts.vae, model.settings
    precision = name_of(settings.dtype) if settings.quantization is None else settings.precision
    return {
        "task": plan.task,
        "models": {name: part.source for name, part in model.experts.of.items()},
        "precision": dict.fromkeys(model.held, precision),
        **({"loras": _loras(model)} if model.lora_files else {}),
        "size": [shape[4] * config.spatial_stride, shape[3] * config.spatial_stride],
        "frames": config.temporal_stride * (shape[2] - 1) + 1,
        "steps": plan.count,
        **({"sigmas": [plan.sigmas[0], plan.sigmas[-1]]} if plan.from_latents or plan.sigmas[-1] else {}),
        **({"nag": nag_words(plan.nag)} if plan.nag else {}),
        **({"windows": plan.context_windows.words()} if plan.context_windows else {}),
        "shift": plan.shift,
        "boundary": plan.boundary,
        "guidance": {e: plan.guidance_of(e) for e in plan.experts},
        "guidance_mode": "batched" if batched else "sequential",
        "solver": plan.solver,
        "seed": seed,
        "attention": settings.attention,
        "compile": settings.compile,
        "residency": model.options.residency,
    }


def _loras(model: ModelSocket) -> dict[str, str]:
    return {
        expert: ", ".join(f"{one.lora.where} {one.strength:g}" for one in wanted)
        for expert, wanted in model.loras.items()
        if wanted
    }

"""The sampler: a plan, walked step by step with a live preview."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from comfy_api.latest import io, ui

from wan_core.config import GUIDANCE_MODES, SkipOptions
from wan_core.execution.memory.planning import TRANSFER_TOKENS
from wan_core.execution.report import Phase, Report
from wan_core.media.drawing import clock
from wan_core.pipeline.comfy_conditioning import join
from wan_core.pipeline.loras import notes_of
from wan_core.pipeline.pipeline import sample_latents
from wan_core.sampling.cache.residual import residual_bytes
from wan_core.sampling.cache.skipping import skip_forwards, skip_words
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.denoise import Progress, choose_batched
from wan_core.sampling.pace import BlockChecks
from wan_core.sampling.plan import MAX_STEPS, SCHEDULES, Expert, Plan
from wan_core.sampling.presets import CHOICES, preset_plan
from wan_core.sampling.sparsity.run import check_kernel
from wan_core.sampling.sparsity.schedule import with_costs

from . import host
from .conditioning import on_device
from .files import name_of
from .schema import ADVANCED, aliases
from .sockets import CONDITIONING, MODEL, REPORT, SKIPPING, ModelSocket

OWN = "0: the model's own"


def plan_inputs() -> list[Any]:
    """The numbers that make a plan, the same in the sampler and the plan preview."""
    return [
        io.Int.Input(
            "steps",
            default=0,
            min=0,
            max=MAX_STEPS,
            tooltip=f"How many steps from noise to video. {OWN} (A14B 40, TI2V-5B 50, embedded 20).",
        ),
        io.Float.Input(
            "shift",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.001,
            tooltip=f"Larger spends more of the steps on high noise. {OWN} (12 for text, 5 for image to video).",
        ),
        io.Float.Input(
            "boundary",
            **ADVANCED,
            default=0.0,
            min=0.0,
            max=1.0,
            step=0.005,
            round=0.0001,
            tooltip="The high-noise expert runs the steps with at least this share of noise, the low-noise expert the "
            f"rest. {OWN} (0.875 for text, 0.9 for image to video).",
        ),
        io.Float.Input(
            "guidance_high",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip="How strongly the high-noise steps follow the prompt (CFG). 1 turns guidance off, which halves the "
            f"time. {OWN}.",
        ),
        io.Float.Input(
            "guidance_low",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip=f"The same for the low-noise steps. {OWN}.",
        ),
        io.Combo.Input(
            "solver",
            options=list(SCHEDULES),
            default="unipc",
            tooltip="unipc is what Wan is released with; euler is what step-distilled models are trained for.",
        ),
    ]


def preset_input() -> Any:
    """Appended where `plan_inputs` are."""
    return io.Combo.Input(
        "preset",
        options=list(CHOICES),
        default="auto",
        optional=True,
        tooltip="Settings of step-distilled weights, for numbers left at 0: few Euler steps, no guidance, half of the "
        "steps for each expert ('-guided': guidance for the high-noise one). 'auto': where the name or metadata of a "
        "LoRA or model says that it is distilled.",
    )


def plan_of(
    model: ModelSocket,
    steps: int,
    shift: float,
    boundary: float,
    guidance_high: float,
    guidance_low: float,
    solver: str,
    skipping: SkipOptions | None = None,
    image: bool = False,
    preset: str = "auto",
) -> Plan:
    """The plan for widgets in which 0 stands for the model's own number, and `unipc` too where a preset says otherwise.
    image: TI2V starts from one."""
    high, low = model.experts.high.path, model.experts.low.path if model.experts.low else None
    loras = model.lora_files
    plan = preset_plan(
        preset,
        [path for path in (*loras, high, low) if path is not None],
        task=model.experts.task.name,
        steps=steps or None,
        shift=shift or model.shift,
        boundary=boundary or (None if model.experts.low else model.experts.task.boundary),
        guidance_high=guidance_high or None,
        guidance_low=guidance_low or None,
        solver=None if solver == "unipc" else solver,
    )
    plan = skip_forwards(plan, skipping, high, low, image=image, loras=loras)
    task, vae, dit = model.experts.task, model.experts.vae, model.experts.dit
    latents = (
        (task.frames - 1) // vae.temporal_stride + 1,
        task.height // vae.spatial_stride,
        task.width // vae.spatial_stride,
    )
    return with_costs(plan, dit, dit.tokens(*latents))  # of the task's own size, until one is known


class WanCoreSampler(io.ComfyNode):
    """Noise to latents."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreSampler",
            display_name="WanCore Sampler",
            category="WanCore",
            **aliases("WanCoreSampler"),
            description="Runs both experts over the steps of a plan. Numbers left at 0 come from the model.",
            inputs=[
                MODEL.Input("model", tooltip="From the WanCore Model Loader."),
                io.Conditioning.Input("positive", tooltip="The encoded prompt, and the image if there is one."),
                io.Conditioning.Input("negative", tooltip="The encoded negative prompt; unused where guidance is 1."),
                io.Latent.Input("latent", tooltip="The size of the video: an empty latent, WanCore's or ComfyUI's."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=2**64 - 1,
                    control_after_generate=True,
                    tooltip="Which noise to start from; drawn on the CPU, so that it means the same on every device.",
                ),
                *plan_inputs(),
                io.Combo.Input(
                    "guidance_mode",
                    **ADVANCED,
                    options=list(GUIDANCE_MODES),
                    default="auto",
                    tooltip="Run the two branches of guidance as one forward ('batched') or apart. 'auto' decides by "
                    "size. The result is the same but for rounding.",
                ),
                SKIPPING.Input(
                    "skipping",
                    optional=True,
                    tooltip="Which forwards need not run, from WanCore MagCache and its like. Nothing connected: every "
                    "one runs.",
                ),
                preset_input(),
            ],
            outputs=[
                io.Latent.Output("latent_out", display_name="latent", tooltip="Finished, for any VAE Decode."),
                REPORT.Output("report", display_name="report", tooltip="Times, memory and settings so far."),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: ModelSocket,
        positive: CONDITIONING,
        negative: CONDITIONING,
        latent: dict[str, Any],
        seed: int,
        steps: int,
        shift: float,
        boundary: float,
        guidance_high: float,
        guidance_low: float,
        solver: str,
        guidance_mode: str,
        skipping: SkipOptions | None = None,
        preset: str = "auto",
    ) -> io.NodeOutput:
        image = "noise_mask" in latent
        plan = plan_of(model, steps, shift, boundary, guidance_high, guidance_low, solver, skipping, image, preset)
        plan, conditioning, text_seconds, text_notes = join(positive, negative, latent, model.experts, plan)
        conditioning = on_device(conditioning)
        shape = tuple(latent["samples"].shape)
        tokens = model.experts.dit.tokens(*shape[2:])
        plan = with_costs(plan, model.experts.dit, tokens)
        if plan.sparse is not None and model.workers is None:
            check_kernel(plan.sparse, model.settings.attention, host.device(), model.experts.dit.head_dim, tokens)
        kept = residual_bytes(plan, shape[0] * tokens, model.experts.dit.dim, model.settings.dtype.itemsize)
        blocks = model.resident_blocks(model.memory(shape[0] * tokens) + kept)
        streamed = blocks is not None and tokens <= TRANSFER_TOKENS
        batched, why = choose_batched(guidance_mode, plan, tokens, streamed=streamed)
        settings = _settings(model, plan, shape, seed, batched)
        if skipping is not None:
            settings["skipping"] = skip_words(skipping)
        report = Report(host.device(), settings)
        report.notes.append(f"guidance: {'batched' if batched else 'sequential'} ({why})")
        if model.workers is None:  # they say the same when they load
            report.notes += [*model.experts.notes, *notes_of(model.loras)]
        report.notes += text_notes
        report.phases["text"] = Phase(text_seconds)
        watcher = _Watcher(model, len(plan.steps))
        videos = shape[0] * tokens * (1 + batched)
        if blocks is not None:
            report.notes.append(f"memory: {blocks} of {model.experts.dit.num_layers} blocks stay, the others stream")
        if model.settings.compile != "off" and not model.pace:
            host.show("compiling in the first step ...")
        if model.workers is not None:
            latents = model.workers.sample(model, plan, conditioning, shape, seed, batched, report, watcher)
        else:
            latents = sample_latents(
                plan,
                lambda expert: model.acquire(expert, videos, report, kept),
                conditioning,
                draw_noise(seed, shape).to(host.device()),
                model.experts.vae,
                report,
                batched=batched,
                on_step=watcher,
                checks=BlockChecks(host.check_interruption),
                ahead=model.prefetch,
                relieve=_relieve_once(model, videos, kept, report),
            )
        model.pace.clear()
        for expert in plan.experts:
            model.pace[expert] = report.phases[f"denoise {expert}"].seconds / watcher.forwards[expert]
        words = f"{plan.table().splitlines()[0]}\ndone in {clock(report.total_seconds)}"
        return io.NodeOutput({"samples": host.to_intermediate(latents)}, report, ui=ui.PreviewText(words))


def _relieve_once(model: ModelSocket, videos: int, kept: int, report: Report) -> Callable[[Expert], bool]:
    """For `denoise`: after out of memory, make room once in a run, and say so. videos: tokens of a forward. kept: bytes
    of residuals."""
    relieved: list[str] = []

    def relieve(expert: Expert) -> bool:
        words = None if relieved else model.relieve(expert, videos, kept)
        if words is None:
            return False
        relieved.append(words)
        host.log.warning("WanCore ran out of memory and goes on: %s", words)
        report.notes.append(f"out of memory, going on with what takes less ({words}); finished steps stay")
        return True

    return relieve


class _Watcher:
    """After every step: the preview, the bar and how long the rest will take. Raises where the user interrupts.
    `forwards`: that ran, which a plan that decides while running does not know, each as the part that it costs."""

    def __init__(self, model: ModelSocket, steps: int) -> None:
        self.forwards: dict[Expert, float] = defaultdict(float)
        self.rgb = model.rgb
        self.progress = host.Progress(steps)

    def __call__(self, progress: Progress, seconds: float | None) -> None:
        done, total, expert = progress.step.index + 1, progress.total, progress.step.expert
        self.forwards[expert] += progress.forwards * progress.step.cost
        step = 0.0 if seconds is None else seconds * len(progress.step.branches) * progress.step.cost
        left = "" if seconds is None else f", {step:.3g} s a step, {clock(progress.left(seconds))} left"
        picture = self.rgb.picture(progress.preview()) if self.rgb else None
        self.progress.update(done, total, f"step {done} of {total}, {expert}-noise expert{left}", picture)


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
        "steps": len(plan.steps),
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

"""Node that shows the plan of a graph with ComfyUI's own models and samplers, before it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comfy_api.latest import io  # pyright: ignore[reportMissingImports]
from torch import Tensor

from wan_core.config import OptionError, SkipOptions
from wan_core.sampling.build import SamplerRequest, build_sampler_plan
from wan_core.sampling.native.plan import WholeRun, joined, with_evaluations
from wan_core.sampling.plan import MAX_STEPS, WARNING, Plan
from wan_core.sampling.plan_drawing import draw_plan
from wan_core.sampling.sparsity.schedule import with_costs
from wan_core.sampling.steps import Expert

from . import host
from .native_model import frames_seen, with_native_windows
from .report import as_image, shown
from .schema import output, schema


class WanCoreNativePlan(io.ComfyNode):
    """Show which steps of a native graph are skipped and which read sparsely."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreNativePlan",
            "WanCore Plan for KSampler",
            aliases=("wan schedule", "steps preview", "ksampler plan", "teacache", "magcache"),
            description="Shows the steps of ComfyUI's own samplers with WanCore Accelerate: which are skipped, which "
            "read sparsely, and the estimated time. Connect the models as they go to the samplers. Nothing is loaded.",
            inputs=[
                io.Model.Input("model", tooltip="As it goes to the sampler; of two experts, the high-noise one."),
                io.Int.Input("steps", default=20, min=1, max=MAX_STEPS, tooltip="As in the sampler: of the whole run."),
                io.Float.Input(
                    "cfg", default=3.5, min=0.0, max=100.0, step=0.1, round=0.01, tooltip="As in the sampler."
                ),
                io.Combo.Input("sampler_name", options=host.sampler_names(), tooltip="As in the sampler."),
                io.Combo.Input("scheduler", options=host.scheduler_names(), tooltip="As in the sampler."),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    tooltip="As in the sampler: below 1, it starts in the middle of a longer run.",
                ),
                io.Float.Input(
                    "seconds_per_forward",
                    default=0.0,
                    min=0.0,
                    max=100000.0,
                    step=0.01,
                    round=0.0001,
                    tooltip="Seconds of one forward, for the time estimate. 0: as measured in the last run with a step "
                    "cache, if there was one.",
                ),
                io.Model.Input(
                    "model_low", optional=True, tooltip="The low-noise expert, where a second sampler runs it."
                ),
                io.Int.Input(
                    "split_step",
                    default=10,
                    min=1,
                    max=MAX_STEPS,
                    optional=True,
                    tooltip="With model_low: the step at which its sampler starts (end_at_step of the first sampler).",
                ),
                io.Float.Input(
                    "cfg_low",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    optional=True,
                    tooltip="With model_low: cfg of its sampler. 0: the same.",
                ),
                io.Sigmas.Input(
                    "sigmas", optional=True, tooltip="Of the whole run, in place of steps, scheduler and denoise."
                ),
                io.Latent.Input(
                    "latent", optional=True, tooltip="The size of the video, for sparse steps and context windows."
                ),
            ],
            outputs=[
                output(io.Image, "image", "The plan, drawn."),
                output(io.String, "text", "The plan as a table."),
            ],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, seconds_per_forward: float = 0, **_: Any) -> float:
        return seconds_per_forward or float("nan")  # NaN is never cached: measured times change with every run

    @classmethod
    def execute(
        cls,
        model: Any,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        denoise: float,
        seconds_per_forward: float,
        model_low: Any = None,
        split_step: int = 10,
        cfg_low: float = 0.0,
        sigmas: Tensor | None = None,
        latent: dict[str, Any] | None = None,
    ) -> io.NodeOutput:
        parts: list[tuple[Any, float, list[float]]] = []
        for one, scale in ((model, cfg), (model_low, cfg_low or cfg)):
            if one is not None:
                own = host.sampler_sigmas(one, sampler_name, scheduler, steps, denoise) if sigmas is None else sigmas
                parts.append((one, scale, own.tolist()))
        if model_low is not None:
            count = len(parts[0][2]) - 1
            if split_step >= count:
                raise OptionError(f"split_step {split_step} given; the run has {count} steps: both models need some")
            parts = [(*parts[0][:2], parts[0][2][: split_step + 1]), (*parts[1][:2], parts[1][2][split_step:])]
        size = None if latent is None else tuple(latent["samples"].shape[2:])
        plan = joined([_plan(one, scale, own, sampler_name, size, latent) for one, scale, own in parts])
        seconds: dict[Expert, float] = {}
        for expert, part in zip(plan.experts, parts if len(parts) > 1 else parts * 2, strict=False):
            cache = host.attached(part[0])
            measured = cache.pace[0] if cache is not None and cache.pace else 0.0
            if seconds_per_forward or measured:
                seconds[expert] = seconds_per_forward or measured
        image, text = as_image(draw_plan(plan, plan.estimate(seconds))), plan.table()
        lines = "\n".join([*(WARNING + warning for warning in plan.warnings), text.splitlines()[0]])
        return io.NodeOutput(image, text, ui=shown(image, lines, cls))


def _plan(model: Any, cfg: float, sigmas: list[float], sampler: str, size: tuple[int, ...] | None, latent: Any) -> Plan:
    """The plan of what one sampler runs with `model`. size: T, Y, X of the latents."""
    cache, sparse = host.attached(model), host.sparse_of(model)
    options = replace(SkipOptions() if cache is None else cache.options, sparse=sparse)
    native = host.describe(model)
    if size is None and native.task is not None:
        task = native.task
        size = (task.vae.latent_frames(task.frames),
                task.height // task.vae.spatial_stride, task.width // task.vae.spatial_stride)  # fmt: skip
    evaluated, both = host.evaluations(model, sampler, sigmas)
    both = both or cfg != 1 or model.model_options.get("disable_cfg1_optimization", False)
    request = SamplerRequest(
        sigmas=tuple(sigmas),
        whole=WholeRun() if cache is None else cache.whole,
        solver=sampler,
        guidance=cfg,
        branches=("cond", "uncond") if both else ("cond",),
        skip=options,
        windows=host.window_schedule(model.model_options),
        image=latent is not None and "noise_mask" in latent,
    )
    plan, _ = build_sampler_plan(request, native)
    plan = with_evaluations(plan, sampler, evaluated)
    for high, low in host.skip_layer_ranges(model.model_options):
        note = f"skip-layer guidance runs the prompt once more where sigma is {low:.4g} to {high:.4g}: not counted"
        plan = replace(plan, notes=(*plan.notes, note))
    plan = with_native_windows(plan, model, None if latent is None else latent["samples"].shape[2])
    if size is None:
        return plan
    T, Y, X = size
    return with_costs(plan, native.config, (frames_seen(plan, model, T), Y, X))

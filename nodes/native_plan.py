"""The plan of a graph with ComfyUI's own models and samplers, before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wan_core.config import OptionError, SkipOptions
from wan_core.sampling.build import SamplerRequest, build_sampler_plan
from wan_core.sampling.native.plan import joined
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.schedule import with_costs
from wan_core.sampling.steps import Expert

from . import host
from .plan_inputs import settings_of

SAMPLERS = ("KSampler", "KSamplerAdvanced")
# Inputs of ComfyUI's samplers -> what they are called here, by the socket of the plan preview that the model comes in.
OF_SAMPLERS = {
    "model": {
        "steps": "steps",
        "cfg": "guidance_high",
        "sampler_name": "sampler_name",
        "scheduler": "scheduler",
        "denoise": "denoise",
    },
    "model_low": {"cfg": "guidance_low", "start_at_step": "split_step"},
}


def of_comfy_samplers(graph: Mapping[str, Any], node: str) -> dict[str, Any]:
    """The settings of ComfyUI's samplers that take the models of `node`, in a prompt as ComfyUI runs it; those that
    are found. Raises OptionError as `settings_of`."""
    values: dict[str, Any] = {}
    for socket, names in OF_SAMPLERS.items():
        inputs = graph[node]["inputs"]
        values |= settings_of(graph, {"model": inputs[socket]}, SAMPLERS, names) if socket in inputs else {}
    return values


def native_plan(
    model: Any, values: Mapping[str, Any], model_low: Any, latent: dict[str, Any] | None
) -> tuple[Plan, float | None]:
    """The plan of ComfyUI's samplers with a MODEL, and of a second one with `model_low`, and the estimated seconds;
    None: not known. values: as of `of_comfy_samplers`, and `sigmas`. Raises OptionError."""
    sampler, scheduler = values.get("sampler_name", "euler"), values.get("scheduler", "simple")
    task = host.describe(model).task
    steps = values.get("steps") or (task and task.steps)
    high = values.get("guidance_high") or (task and task.guidance_high)
    if not steps or not high:
        raise OptionError("the task of this MODEL is not known: connect it to the KSampler that runs it, too")
    low = values.get("guidance_low") or (task and task.guidance_low) or high
    parts: list[tuple[Any, float, list[float]]] = []
    for one, scale in ((model, high), (model_low, low)):
        if one is not None:
            own = values.get("sigmas")
            if own is None:
                own = host.sampler_sigmas(one, sampler, scheduler, steps, values.get("denoise", 1.0))
            parts.append((one, scale, own.tolist()))
    if model_low is not None:
        count = len(parts[0][2]) - 1
        split = values.get("split_step") or count // 2
        if not 0 < split < count:
            raise OptionError(f"split_step {split} given; the run has {count} steps: both models need some")
        parts = [(*parts[0][:2], parts[0][2][: split + 1]), (*parts[1][:2], parts[1][2][split:])]
    size = None if latent is None else tuple(latent["samples"].shape[2:])
    plan = joined([_plan(one, scale, own, sampler, size, latent) for one, scale, own in parts])
    seconds: dict[Expert, float] = {}
    for expert, part in zip(plan.experts, parts if len(parts) > 1 else parts * 2, strict=False):
        ours = host.accelerated(part[0])
        if ours is not None and ours.pace:
            seconds[expert] = ours.pace[0]
    return plan, plan.estimate(seconds)


def _plan(model: Any, cfg: float, sigmas: list[float], sampler: str, size: tuple[int, ...] | None, latent: Any) -> Plan:
    """The plan of what one sampler runs with `model`. size: T, Y, X of the latents."""
    ours = host.accelerated(model)
    native = host.describe(model)
    if size is None and native.task is not None:
        task = native.task
        size = (task.vae.latent_frames(task.frames),
                task.height // task.vae.spatial_stride, task.width // task.vae.spatial_stride)  # fmt: skip
    both = cfg != 1 or model.model_options.get("disable_cfg1_optimization", False)
    request = SamplerRequest(
        sigmas=tuple(sigmas),
        whole_steps=0 if ours is None else ours.whole_steps,
        solver=sampler,
        guidance=cfg,
        branches=("cond", "uncond") if both else ("cond",),
        skip=SkipOptions() if ours is None else ours.options,
        windows=host.window_schedule(model.model_options),
        image=latent is not None and "noise_mask" in latent,
    )
    plan, _ = build_sampler_plan(request, native)
    notes = [*plan.notes, f"{sampler} is counted as one evaluation of the model a step"]
    if host.skip_layer_passes(model.model_options):
        notes.append("skip-layer guidance runs the prompt once more in steps of its range: not counted")
    if request.windows is not None:
        notes.append("each context window is a forward of its own: not counted")
    plan = replace(plan, notes=tuple(notes))
    return plan if size is None else with_costs(plan, native.config, size)

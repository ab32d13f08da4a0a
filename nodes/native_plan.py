"""The plan of a graph with ComfyUI's own models and samplers, before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from comfy_api.latest import io  # pyright: ignore[reportMissingImports]

from wan_core.config import EXACT, OptionError, PlanNumbers, SkipOptions
from wan_core.sampling.build import SamplerRequest, build_sampler_plan
from wan_core.sampling.native.plan import WholeRun, joined, with_evaluations
from wan_core.sampling.plan import MAX_STEPS, Plan
from wan_core.sampling.sparsity.schedule import with_costs
from wan_core.sampling.steps import Expert

from . import host
from .native_model import with_native_windows
from .plan_inputs import numbers_of, settings_of, window_of
from .schema import ADVANCED

SAMPLERS = ("KSampler", "KSamplerAdvanced")
OF_OUR_SAMPLER = ("speed", "skipping", "from_image", "frames", "clip_frames", "overlap", "positive")
# Inputs of ComfyUI's samplers -> those of the plan preview, by its socket that the model comes in.
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


def native_inputs() -> list[Any]:
    """What the plan preview needs to know of ComfyUI's samplers beyond what it has."""
    return [
        io.Model.Input(
            "model_low", optional=True, tooltip="For a MODEL: the low-noise expert, where a second sampler runs it."
        ),
        io.Latent.Input(
            "latent",
            optional=True,
            tooltip="For a MODEL: the size of the video, for sparse steps and context windows.",
        ),
        io.Combo.Input(
            "sampler_name",
            **ADVANCED,
            options=host.sampler_names(),
            optional=True,
            tooltip="For a MODEL: as in its sampler.",
        ),
        io.Combo.Input(
            "scheduler",
            **ADVANCED,
            options=host.scheduler_names(),
            optional=True,
            tooltip="For a MODEL: as in its sampler.",
        ),
        io.Int.Input(
            "split_step",
            **ADVANCED,
            default=0,
            min=0,
            max=MAX_STEPS,
            optional=True,
            tooltip="With model_low: the step at which its sampler starts (end_at_step of the first sampler). 0: half "
            "of the steps.",
        ),
    ]


def of_comfy_samplers(graph: Mapping[str, Any], node: str) -> dict[str, Any]:
    """The settings of ComfyUI's samplers that take the models of `node`, in a prompt as ComfyUI runs it; those that
    are found. Raises OptionError as `settings_of`."""
    values: dict[str, Any] = {}
    for socket, names in OF_SAMPLERS.items():
        source = graph[node]["inputs"].get(socket)
        values |= (settings_of(graph, source, SAMPLERS, names) or {}) if source is not None else {}
    return values


def native_plan(
    model: Any, values: Mapping[str, Any], model_low: Any, latent: dict[str, Any] | None, seconds_per_forward: float
) -> tuple[Plan, float | None]:
    """The plan of ComfyUI's samplers with a MODEL, and of a second one with `model_low`, and the estimated seconds;
    None: not known. values: of the plan preview's other inputs. Raises OptionError for one that has no effect here."""
    numbers = _numbers(values)
    sampler = values.get("sampler_name") or host.sampler_names()[0]
    scheduler = values.get("scheduler") or host.scheduler_names()[0]
    task = host.describe(model).task
    steps, high = numbers.steps or (task and task.steps), numbers.guidance_high or (task and task.guidance_high)
    if not steps or not high:
        raise OptionError("the task of this MODEL is not known: enter steps and guidance_high (cfg) of its sampler")
    low = numbers.guidance_low or (task and task.guidance_low) or high
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
        cache = host.attached(part[0])
        measured = cache.pace[0] if cache is not None and cache.pace else 0.0
        if seconds_per_forward or measured:
            seconds[expert] = seconds_per_forward or measured
    return plan, plan.estimate(seconds)


def _numbers(values: Mapping[str, Any]) -> PlanNumbers:
    """Steps and guidance. Raises OptionError for inputs that say nothing of a MODEL's run."""
    numbers = numbers_of(values)
    others = vars(replace(numbers, steps=None, guidance_high=None, guidance_low=None))
    without_effect = [name for name, value in others.items() if value != getattr(PlanNumbers(), name)]
    without_effect += [name for name in OF_OUR_SAMPLER if values.get(name) not in (None, 0, EXACT)]
    if window_of(**{**values, "denoise": 1.0}) is not None:
        without_effect.append("start_step and end_step")
    if without_effect:
        raise OptionError(
            f"{', '.join(without_effect)} given with a MODEL of ComfyUI: that is for models of the WanCore Model "
            "Loader; shift, step caching and sparse attention of a MODEL are those of its own nodes"
        )
    return numbers


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
    plan, seen = with_native_windows(plan, model, None if latent is None else latent["samples"].shape[2])
    return plan if size is None else with_costs(plan, native.config, (seen or size[0], *size[1:]))

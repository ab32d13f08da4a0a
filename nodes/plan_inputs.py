"""The inputs of the sampler that make a plan, the plan that they make, and how the plan preview finds them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from comfy_api.latest import io  # pyright: ignore[reportMissingImports]
from torch import Tensor

from wan_core.config import EXACT, OptionError, PlanNumbers, ScheduleNumbers, SkipOptions
from wan_core.config.table import table
from wan_core.models.wan.families import TASKS
from wan_core.sampling.build import PlanRequest, build_plan
from wan_core.sampling.native.plan import between
from wan_core.sampling.plan import MAX_STEPS, SCHEDULES, Plan
from wan_core.sampling.schedules import Window

from .memory import ModelSocket
from .schema import ADVANCED, value_of, widgets

LAST = 10000  # an end step beyond every schedule
SWITCH = ["enable", "disable"]  # as ComfyUI's KSamplerAdvanced has them
WINDOW = ("denoise", "start_step", "end_step", "return_with_leftover_noise")
SHARED = (*table(PlanNumbers), *WINDOW, "speed", "low_from_step")
RELEASES = ("t2v-A14B", "i2v-A14B", "ti2v-5B")  # those whose numbers tooltips name


def own(field: str) -> str:
    """What 0 stands for, in words."""
    numbers = ", ".join(f"{name} {getattr(TASKS[name], field):g}" for name in RELEASES if getattr(TASKS[name], field))
    return f"0: the model's own ({numbers})"


def plan_inputs() -> list[Any]:
    """The numbers that make a schedule."""
    options = table(ScheduleNumbers)
    changed: dict[str, Any] = {
        name: {"tooltip": one.tip.format(own=own(name))} for name, one in options.items() if "{own}" in one.tip
    }
    changed["steps"]["max"] = MAX_STEPS
    return widgets(ScheduleNumbers, **changed, solver={"options": list(SCHEDULES)})


def window_inputs() -> list[Any]:
    """Which part of the steps runs."""
    return [
        io.Float.Input(
            "denoise",
            default=1.0,
            min=0.01,
            max=1.0,
            step=0.01,
            round=0.0001,
            optional=True,
            tooltip="Strength of video to video, below 1. The last steps of a longer schedule then run, from the video "
            "in `latent`. 1 starts from noise alone.",
        ),
        io.Int.Input(
            "start_step",
            **ADVANCED,
            default=0,
            min=0,
            max=LAST,
            optional=True,
            tooltip="The first step that runs, counted from 0; above 0, the run starts from the video or the leftover "
            "noise in `latent`.",
        ),
        io.Int.Input(
            "end_step",
            **ADVANCED,
            default=LAST,
            min=1,
            max=LAST,
            optional=True,
            tooltip="The step before which the run ends; more than there are means the last.",
        ),
        io.Combo.Input(
            "return_with_leftover_noise",
            **ADVANCED,
            options=SWITCH[::-1],
            default="disable",
            optional=True,
            tooltip="Where the run ends early: leave the rest of the noise for another sampler that goes on there, or "
            "remove it in the last step.",
        ),
        io.Sigmas.Input(
            "sigmas",
            optional=True,
            tooltip="A schedule of its own, from a scheduler node, instead of steps and shift.",
        ),
    ]


def read_numbers(values: Mapping[str, Any]) -> PlanNumbers:
    """The numbers that the values of the sampler's inputs stand for. Raises OptionError."""
    return PlanNumbers(**{name: value_of(one, values.get(name)) for name, one in table(PlanNumbers).items()})


def plan_of(
    model: ModelSocket,
    values: Mapping[str, Any],
    skipping: SkipOptions | None = None,
    image: bool = False,
    **length: Any,
) -> Plan:
    """The plan for the values of the sampler's inputs: 0 is the model's own number, and `unipc` also a preset's solver.
    At the task's own width and height. image: TI2V starts from one. length: `frames`, `known`, `handed` and
    `prompt_starts` of a `PlanRequest`; nothing: the task's own."""
    sigmas: Tensor | None = values.get("sigmas")
    numbers = read_numbers(values)
    if numbers.shift is None and sigmas is None:  # as in ComfyUI, a MODEL's does not change sigmas
        numbers = replace(numbers, shift=model.shift)
    if step := values.get("low_from_step"):
        numbers = replace(numbers, boundary=boundary_at(step, numbers, sigmas, model))
    if values.get("speed", EXACT) != EXACT:
        skipping = replace(skipping or SkipOptions(), speed=values["speed"])
    request = PlanRequest(
        **vars(numbers),
        sigmas=None if sigmas is None else [float(sigma) for sigma in sigmas],
        part=window_of(**values),
        skip=skipping,
        image=image,
        **{"cut": False, **length},
    )
    return build_plan(request, model.facts)


def boundary_at(step: int, numbers: PlanNumbers, sigmas: Tensor | None, model: ModelSocket) -> float:
    """The boundary with which `step` of `sigmas` is the first of the low-noise expert. Raises OptionError."""
    if sigmas is None or len(sigmas) < 2:
        raise OptionError(
            f"low_from_step {step} given, which counts steps of `sigmas`: connect a scheduler, or set it to 0"
        )
    if not model.facts.task.two_experts or numbers.boundary is not None:
        other = f"boundary {numbers.boundary:g} given, too" if numbers.boundary else "the model has one transformer"
        raise OptionError(f"low_from_step {step} given, and {other}: set one of them to 0")
    return between(sigmas.tolist(), min(step, len(sigmas) - 1))


def of_the_sampler(graph: Mapping[str, Any], node: str) -> dict[str, Any]:
    """The settings of the WanCore Sampler that takes the model of `node`. Raises OptionError as `settings_of`."""
    return settings_of(graph, graph[node]["inputs"], ("WanCoreSampler",), {name: name for name in SHARED})


def settings_of(
    graph: Mapping[str, Any], inputs: Mapping[str, Any], kinds: Collection[str], names: Mapping[str, str]
) -> dict[str, Any]:
    """The settings of the sampler that takes the `model` of `inputs`, in a prompt as ComfyUI runs it; of several, of
    those that take the same latent, positive and so on. Empty where there is none. kinds: of samplers. names: of their
    inputs, and what each is called here. What comes through a link is known if a node of one value gives it. Raises
    OptionError where these samplers have different settings, or one that is computed."""
    samplers = [one["inputs"] for one in graph.values() if one["class_type"] in kinds]
    samplers = [one for one in samplers if one.get("model") == inputs["model"]]
    for link in ("latent", "positive", "skipping", "sigmas"):
        samplers = [one for one in samplers if one.get(link) == inputs.get(link)] or samplers
    settings = [
        {name: _constant(graph, one[theirs]) for theirs, name in names.items() if theirs in one} for one in samplers
    ]
    if any(one != settings[0] for one in settings):
        raise OptionError(
            f"{len(settings)} samplers with different settings take the model that this plan is of: connect latent, "
            "positive and skipping as those of one are"
        )
    computed = ", ".join(name for one in settings[:1] for name, value in one.items() if isinstance(value, list))
    if computed:
        raise OptionError(
            f"{computed} of the sampler: another node computes it, and it is not known before that node ran. Enter it "
            "in the sampler, or in a node of one value"
        )
    return settings[0] if settings else {}


def _constant(graph: Mapping[str, Any], value: Any) -> Any:
    """What a widget has, or the value of the node that it is linked to, if that has one."""
    if not isinstance(value, list) or value[0] not in graph:
        return value
    return graph[value[0]]["inputs"].get("value", value)


def check_window(denoise: float | None, start_step: int | None, end_step: int | None) -> bool:
    """For `validate_inputs`. Raises OptionError for a part of the steps that has none."""
    if not (denoise is None or start_step is None or end_step is None):
        Window(denoise=denoise, start=start_step, end=end_step)
    return True


def window_of(
    denoise: float = 1.0, start_step: int = 0, end_step: int = LAST, return_with_leftover_noise: str = "", **_: Any
) -> Window | None:
    """The part of the steps that these inputs ask for; None for all of them."""
    leftover = return_with_leftover_noise == "enable"
    window = Window(denoise=denoise, start=start_step, end=end_step, leftover=leftover)
    return None if window == Window(end=LAST, leftover=leftover) else window

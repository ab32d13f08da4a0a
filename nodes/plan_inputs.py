"""The inputs that make a plan, the same in the sampler and the plan preview, and the plan that they make."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from torch import Tensor

from wan_core.config import SkipOptions
from wan_core.models.wan.tasks import TASKS
from wan_core.sampling.build import PlannedVideo, PlanRequest, build_plan
from wan_core.sampling.plan import MAX_STEPS, SCHEDULES
from wan_core.sampling.presets import CHOICES
from wan_core.sampling.window import Window

from .schema import ADVANCED
from .sockets import ModelSocket

LAST = 10000  # an end step beyond every schedule
SWITCH = ["enable", "disable"]  # as ComfyUI's KSamplerAdvanced has them
RELEASES = ("t2v-A14B", "i2v-A14B", "ti2v-5B")  # those whose numbers tooltips name


def own(field: str) -> str:
    """What 0 stands for, in words."""
    numbers = ", ".join(f"{name} {getattr(TASKS[name], field):g}" for name in RELEASES if getattr(TASKS[name], field))
    return f"0: the model's own ({numbers})"


def plan_inputs() -> list[Any]:
    """The numbers that make a plan, the same in the sampler and the plan preview."""
    return [
        io.Int.Input(
            "steps",
            default=0,
            min=0,
            max=MAX_STEPS,
            tooltip=f"How many steps from noise to video. {own('steps')}.",
        ),
        io.Float.Input(
            "shift",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.001,
            tooltip=f"Larger spends more of the steps on high noise. {own('shift')}.",
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
            f"rest. {own('boundary')}.",
        ),
        io.Float.Input(
            "guidance_high",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip="How strongly the high-noise steps follow the prompt (CFG). 1 turns guidance off, which halves the "
            f"time. {own('guidance_high')}.",
        ),
        io.Float.Input(
            "guidance_low",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip=f"The same for the low-noise steps. {own('guidance_low')}.",
        ),
        io.Combo.Input(
            "solver",
            options=list(SCHEDULES),
            default="unipc",
            tooltip="unipc is what Wan is released with; euler is what step-distilled models are trained for. heun "
            "runs two forwards a step; lcm adds new noise at each.",
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
        "LoRA or model says that it is distilled. 'template': as ComfyUI's Wan 2.2 templates, 20 steps, or 4 with a "
        "distilled LoRA.",
    )


def window_inputs() -> list[Any]:
    """Which part of the steps runs. Appended where `plan_inputs` are, after `preset_input`."""
    return [
        io.Float.Input(
            "denoise",
            default=1.0,
            min=0.01,
            max=1.0,
            step=0.01,
            round=0.0001,
            optional=True,
            tooltip="Strength of video to video: below 1, the last steps of a longer schedule run, from the video in "
            "`latent`. 1 starts from noise alone.",
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
    window: Window | None = None,
    sigmas: Tensor | None = None,
    **length: Any,
) -> PlannedVideo:
    """The plan for widgets in which 0 stands for the model's own number, and `unipc` too where a preset says otherwise,
    at the task's own width and height. image: TI2V starts from one. length: `frames`, `clip_frames`, `overlap` and
    `cut` of a `PlanRequest`; nothing: one clip of the task's own."""
    request = PlanRequest(
        preset=preset,
        steps=steps or None,
        shift=shift or (model.shift if sigmas is None else None),  # as in ComfyUI, a MODEL's does not change sigmas
        boundary=boundary or None,
        guidance_high=guidance_high or None,
        guidance_low=guidance_low or None,
        solver=None if solver == "unipc" else solver,
        sigmas=None if sigmas is None else [float(sigma) for sigma in sigmas],
        part=window,
        skip=skipping,
        windows=model.windows,
        image=image,
        **{"cut": False, **length},
    )
    return build_plan(request, model.facts)


def check_window(denoise: float | None, start_step: int | None, end_step: int | None) -> bool:
    """For `validate_inputs`. Raises OptionError for a part of the steps that has none."""
    if not (denoise is None or start_step is None or end_step is None):
        Window(denoise=denoise, start=start_step, end=end_step)
    return True


def window_of(denoise: float, start_step: int, end_step: int, leftover: str) -> Window | None:
    """The part of the steps that these inputs ask for; None for all of them."""
    window = Window(denoise=denoise, start=start_step, end=end_step, leftover=leftover == "enable")
    return None if window == Window(end=LAST, leftover=window.leftover) else window

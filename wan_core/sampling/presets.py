"""Settings under one name: for step-distilled weights, few Euler steps without guidance; and those of templates.

Step-distilled weights are recognised by the metadata or the name of the LoRA or checkpoint ("4steps", "lightx2v",
"lightning", ..., see `wan_core.config.file_names`). A preset sets only what the user did not set.

Steps, shift and solver are those that LightX2V distilled Wan 2.2 for: 4 steps at shift 5 are the timesteps 1000, 937.5,
833.3 and 625. The high-noise expert always runs the first half of the steps: the boundary follows from the schedule.
`-guided` presets guide the high-noise expert, which keeps more motion and doubles that expert's forwards. `motion`
presets guide the first steps alone and run them without step-distilled LoRAs (`wan_core.sampling.motion`).

Source: LightX2V/configs/wan22/wan_moe_t2v_distill.json; lightx2v/models/schedulers/wan/step_distill/scheduler.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wan_core.config import MotionOptions, OptionError, PlanNumbers, ScheduleNumbers, check_choice
from wan_core.config.file_names import file_says
from wan_core.config.table import table
from wan_core.models.wan.families import Task
from wan_core.sampling.motion import motion_numbers
from wan_core.sampling.plan import SCHEDULES, Plan, make_plan
from wan_core.sampling.schedules import Window, given_schedule

GUIDED = 3.5  # the usual guidance scale for the high-noise expert of distilled weights


@dataclass(frozen=True, kw_only=True)
class Preset:
    name: str
    steps: int
    shift: float = 5.0
    solver: str = "euler"
    guidance_high: float = 1.0
    guidance_low: float = 1.0
    motion: bool = False  # its first steps are guided and without step-distilled LoRAs; shift and boundary go by task


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for steps in (4, 6, 8)
    for preset in (
        Preset(name=f"{steps}-step", steps=steps),
        Preset(name=f"{steps}-step-guided", steps=steps, guidance_high=GUIDED),
    )
}
STEPPED = tuple(PRESETS)
PRESETS |= {
    "motion": Preset(name="motion", steps=4, motion=True),
    "8-step-motion": Preset(name="8-step-motion", steps=8, motion=True),
    # ComfyUI's own templates of Wan 2.2 A14B: as they are without step-distilled files; with them, four steps.
    "template": Preset(name="template", steps=20, guidance_high=GUIDED, guidance_low=GUIDED),
}
CHOICES = ("auto", "none", *PRESETS)


def find_preset(name: str, files: Sequence[Path] = ()) -> tuple[Preset | None, str]:
    """(preset, reason). "auto" takes the preset of the first file that is step-distilled, or none, and "template" four
    steps where a file is. Without a preset, the reason is what says that a file is not distilled, or "".

    files: the files of the experts and their LoRAs. Raises OptionError for an unknown name.
    """
    check_choice("preset", name, CHOICES)
    said = [file_says(file) for file in files]
    distilled = next((one for one in said if one.steps is not None), None)
    if name == "template" and distilled is not None:
        return PRESETS["4-step"], f"asked for as template, and {distilled.why}"
    if name != "auto":
        return PRESETS.get(name), "asked for"
    if distilled is None:
        return None, next((one.why for one in said if one.why), "")
    assert distilled.steps is not None
    return nearest(distilled.steps), f"{distilled.why}; if it is not, choose preset none"


def nearest(steps: int) -> Preset:
    """The preset for weights that are distilled for so many steps."""
    return min((PRESETS[name] for name in STEPPED), key=lambda preset: abs(preset.steps - steps))


def motion_of(numbers: PlanNumbers, task: Task, files: Sequence[Path]) -> MotionOptions | None:
    """The guided steps without step-distilled LoRAs that a user or a preset asks for."""
    preset, _ = find_preset(numbers.preset, files)
    if numbers.motion is not None or preset is None or not preset.motion:
        return numbers.motion
    return MotionOptions(above=motion_numbers(task).above)


def preset_plan(
    numbers: PlanNumbers,
    files: Sequence[Path] = (),
    *,
    task: Task,
    sigmas: Sequence[float] | None = None,
    window: Window | None = None,
) -> Plan:
    """The plan of `make_plan`. Numbers that are None come from a preset, else from the task. Raises OptionError."""
    if sigmas is not None and numbers.shift is not None:
        raise OptionError(f"shift {numbers.shift:g} given, and sigmas, which have a shift already: leave the shift out")
    own = numbers.preset == "auto" and task.distilled
    preset, reason = find_preset(numbers.preset, () if own else files)
    values: dict[str, Any] = {name: getattr(numbers, name) for name in table(ScheduleNumbers)}
    if preset is None:
        plan = make_plan(task=task, sigmas=sigmas, window=window, **{**values, "solver": numbers.solver or "unipc"})
        said = numbers.preset == "auto" and reason
        notes = (f"no preset: {reason}; if it is step-distilled, choose one",) if said else ()
        return replace(plan, notes=(*plan.notes, *notes))
    if preset.motion:
        usual = motion_numbers(task)
        values["shift"] = usual.shift if values["shift"] is None and sigmas is None else values["shift"]
        if task.two_experts and values["boundary"] is None:
            values["boundary"] = usual.boundary
    of_preset = {name: getattr(preset, name, None) for name in values}
    if not task.two_experts and not values["boundary"]:  # no step is a low-noise one
        of_preset["guidance_low"] = None
    values = {name: of_preset[name] if value is None else value for name, value in values.items()}
    if numbers.steps is None and sigmas is not None:
        values["steps"] = len(sigmas) - 1
    plan = make_plan(task=task, sigmas=sigmas, window=window, **values)
    if values["boundary"] is None and task.two_experts and values["steps"] > 1:
        make = SCHEDULES[values["solver"]]
        _, timesteps = make(values["steps"], values["shift"]) if sigmas is None else given_schedule(sigmas)
        half = len(timesteps) // 2  # the high-noise expert runs the first half of the steps
        values["boundary"] = round((timesteps[half - 1] + timesteps[half]) / 2000, 6)
        plan = make_plan(task=task, sigmas=sigmas, window=window, **values)
    return replace(plan, notes=(*plan.notes, f"preset {preset.name}: {reason}"))

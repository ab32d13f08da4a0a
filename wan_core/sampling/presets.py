"""Settings of step-distilled weights: few Euler steps, and no guidance.

The weights themselves look like any others, so what says that they are distilled is the metadata or the name of a LoRA
or checkpoint ("4steps", "lightx2v", "lightning", ...). A preset fills in what a user leaves open and never overrides
what was given.

Steps, shift and solver are those that LightX2V distilled Wan 2.2 for: 4 steps at shift 5 are the timesteps 1000, 937.5,
833.3 and 625. The high-noise expert runs the first half of the steps, whatever their number: the boundary follows
from the schedule. `-guided` presets guide the high-noise expert, which keeps more motion, and costs its forwards twice.

Source: LightX2V/configs/wan22/wan_moe_t2v_distill.json; lightx2v/models/schedulers/wan/step_distill/scheduler.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wan_core.config import check_choice
from wan_core.models.wan.tasks import find_task
from wan_core.sampling.cache.skipping import looks_distilled
from wan_core.sampling.plan import SCHEDULES, Plan, make_plan

GUIDED = 3.5  # what those who guide the high-noise expert of distilled weights use
_STEPS = re.compile(r"(?<![0-9])([1-8])[ _-]?steps?(?![a-z])", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Preset:
    name: str
    steps: int
    shift: float = 5.0
    solver: str = "euler"
    guidance_high: float = 1.0
    guidance_low: float = 1.0


PRESETS: dict[str, Preset] = {
    preset.name: preset
    for steps in (4, 6, 8)
    for preset in (
        Preset(name=f"{steps}-step", steps=steps),
        Preset(name=f"{steps}-step-guided", steps=steps, guidance_high=GUIDED),
    )
}
CHOICES = ("auto", "none", *PRESETS)


def find_preset(name: str, files: Sequence[Path] = ()) -> tuple[Preset | None, str]:
    """The preset called `name` and why; for "auto" the one that the first of `files` that speaks of distillation asks
    for. files: of the experts and their LoRAs. Raises OptionError for an unknown name."""
    check_choice("preset", name, CHOICES)
    if name != "auto":
        doubtful = files and not any(distilled_steps(file) for file in files)
        return PRESETS.get(name), f"asked for{', and no file says that it is step-distilled' if doubtful else ''}"
    for file in files:
        steps = distilled_steps(file)
        if steps is not None:
            return PRESETS[f"{steps}-step"], f"{file.name} is step-distilled, as its name or metadata says"
    return None, ""


def distilled_steps(file: Path) -> int | None:
    """For how many steps the weights in `file` are distilled, of those that there are presets for; None where nothing
    says that they are."""
    said = safetensors_metadata(file).get("distilled", "")
    named = _STEPS.search(said) or (_STEPS.search(file.name) or _STEPS.search(file.parent.name))
    if not said and not looks_distilled(file):
        return None
    steps = int(named[1]) if named else 4
    return min((preset.steps for preset in PRESETS.values()), key=lambda count: abs(count - steps))


def safetensors_metadata(file: Path) -> Mapping[str, str]:
    """What the header of a safetensors file says in words; nothing where it is none. Without torch: plans need none."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > 2**26 or opened.read(1) != b"{":
                return {}
            found = json.loads(b"{" + opened.read(length - 1)).get("__metadata__", {})
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()) else {}


def preset_plan(
    preset: str = "auto",
    files: Sequence[Path] = (),
    *,
    task: str,
    steps: int | None = None,
    shift: float | None = None,
    boundary: float | None = None,
    guidance_high: float | None = None,
    guidance_low: float | None = None,
    solver: str | None = None,
    two_experts: bool | None = None,
) -> Plan:
    """As `make_plan`, with what is None from a preset first (see `find_preset`), and then from the task.

    two_experts: whether two transformers are there; None: as the task has. Raises OptionError.
    """
    found, why = find_preset(preset, files)
    if found is None:
        return make_plan(
            task=task, steps=steps, shift=shift, boundary=boundary, guidance_high=guidance_high,
            guidance_low=guidance_low, solver=solver or "unipc",
        )  # fmt: skip
    count, bent = steps or found.steps, shift or found.shift
    by = solver or found.solver
    two = find_task(task).two_experts if two_experts is None else two_experts
    numbers = {
        "task": task,
        "steps": count,
        "shift": bent,
        "guidance_high": found.guidance_high if guidance_high is None else guidance_high,
        "guidance_low": found.guidance_low if guidance_low is None else guidance_low,
        "solver": by,
    }
    plan = make_plan(**numbers, boundary=boundary)
    if boundary is None and two and count > 1:
        plan = make_plan(**numbers, boundary=halfway(SCHEDULES[by](count, bent)[1]))
    return replace(plan, notes=(*plan.notes, f"preset {found.name}: {why}"))


def halfway(timesteps: Sequence[float]) -> float:
    """The boundary that gives the first half of the steps to the high-noise expert."""
    half = len(timesteps) // 2
    return round((timesteps[half - 1] + timesteps[half]) / 2000, 6)

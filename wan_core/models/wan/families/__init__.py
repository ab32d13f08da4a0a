"""The families of Wan models, and the tasks that their checkpoints were trained for. Imports no torch.

One folder for each, with everything that is particular to it; `family` says what a family is. A new one is a folder and
a row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wan_core.config.checks import OptionError, unknown
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.animate import ANIMATE
from wan_core.models.wan.families.animate2 import ANIMATE2
from wan_core.models.wan.families.family import Family
from wan_core.models.wan.families.fun import FUN_CAMERA, FUN_CONTROL
from wan_core.models.wan.families.s2v import S2V
from wan_core.models.wan.families.task import Choice, Clues, Task
from wan_core.models.wan.families.vace import VACE
from wan_core.models.wan.families.wan import WAN

FAMILIES: dict[str, Family] = {
    family.name: family for family in (ANIMATE, S2V, VACE, FUN_CONTROL, FUN_CAMERA, WAN, ANIMATE2)
}
TASKS: dict[str, Task] = {task.name: task for family in FAMILIES.values() for task in family.tasks}
# Of ComfyUI's CONDITIONING: what text encoders and FluxGuidance add, which no Wan model looks at, and what WanCore's
# own text encoder says about a prompt.
NEUTRAL = ("pooled_output", "attention_mask", "guidance", "wancore_seconds", "wancore_notes", "wancore_prompt")
NAG = "wancore_nag"  # NagOptions, on a negative prompt
# On a prompt: the frames at which prompts of parts of the video begin ("starts"), and how many tokens the text has
# before each of them and in all ("tokens").
PROMPTS = "wancore_prompts"
TIMES = ("start_percent", "end_percent")  # where in a run a text is used (`wan_core.sampling.texts`)
NO_EFFECT: Mapping[str, Any] = {"strength": 1.0, "set_area_to_bounds": False, "mask_strength": 1.0}


def find_family(name: str) -> Family:
    """The family called `name`. Raises OptionError listing the known ones."""
    if name not in FAMILIES:
        raise unknown("family", name, FAMILIES)
    return FAMILIES[name]


def family_of(of: DiTConfig | Task) -> Family:
    return FAMILIES[of.family]


def check_keys(family: Family, name: str, extras: Mapping[str, Any]) -> None:
    """Raise OptionError for what a CONDITIONING called `name` carries and a model of the family would not see. Values
    that have no effect pass: None, and a strength of 1."""
    known = {*NEUTRAL, *TIMES, *family.conditioning_keys, *([NAG] if name == "negative" else ())}
    known |= {PROMPTS} if name == "positive" and family.prompts_over_time else set()
    unexpected = {key: value for key, value in extras.items() if key not in known and value is not None}
    unknown = [key for key, value in unexpected.items() if key not in NO_EFFECT or value != NO_EFFECT[key]]
    if unknown:
        raise OptionError(
            f"`{name}` carries {', '.join(unknown)}, which this model does not take: leave out the nodes that add it, "
            "or load a model that takes it"
        )


def check_sparse(task: Task) -> None:
    """Raise OptionError where the models of a task cannot have sparse attention."""
    if why := family_of(task).why_not_sparse(task):
        raise OptionError(f"sparse attention: {why}")


def check_prompts_over_time(task: Task) -> None:
    """Raise OptionError where frames of a task cannot attend to texts of their own."""
    if not family_of(task).prompts_over_time:
        able = ", ".join(family.name for family in FAMILIES.values() if family.prompts_over_time)
        raise OptionError(
            f"{task.name} takes one prompt for the whole video: leave the prompts of parts of it out; they are for "
            f"models of the family {able}"
        )


def plain_task(task: Task) -> Task:
    """A task of the same size and defaults that takes text alone: what memory and time cost before there are media."""
    return replace(task, image="none", driven_by="", family=WAN.name)


def choose_task(dit: DiTConfig, clues: Clues | None = None) -> Choice:
    """The task that a transformer of this architecture was trained for. Raises OptionError."""
    return family_of(dit).choose(dit, clues or Clues())


def find_task(name: str) -> Task:
    """The task called `name`, any case. Raises OptionError listing the known ones."""
    for known, task in TASKS.items():
        if known.lower() == name.lower():
            return task
    raise unknown("task", name, TASKS)


def image_task(latent_channels: int) -> Task:
    """The first task with an image and latents of so many channels: where only the VAE is known. Raises OptionError."""
    for task in TASKS.values():
        if task.image != "none" and not task.driven_by and task.vae.z_dim == latent_channels:
            return task
    raise OptionError(
        f"no image-to-video model works on latents of {latent_channels} channels: use the model's own VAE"
    )

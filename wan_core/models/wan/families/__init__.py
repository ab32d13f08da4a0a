"""The families of Wan models. Imports no torch.

One folder for each, with everything that is particular to it; `family` says what a family is. A new one is a folder and
a row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wan_core.config.checks import OptionError
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.family import Choice, Clues, Family, Task
from wan_core.models.wan.families.wan import WAN

FAMILIES: dict[str, Family] = {family.name: family for family in (WAN,)}
# Of ComfyUI's CONDITIONING: what text encoders and FluxGuidance add, which no Wan model looks at.
NEUTRAL = ("pooled_output", "attention_mask", "guidance")


def family_of(of: DiTConfig | Task) -> Family:
    """The family of an architecture or a task."""
    return FAMILIES[of.family]


def check_keys(family: Family, name: str, extras: Mapping[str, Any]) -> None:
    """Raise OptionError for what a CONDITIONING called `name` carries and a model of the family would not see."""
    known = {*NEUTRAL, *family.conditioning_keys}
    unknown = [key for key, value in extras.items() if value is not None and key not in known]
    if unknown:
        raise OptionError(
            f"`{name}` carries {', '.join(unknown)}, which this model does not take: leave out the nodes that add it, "
            "or load a model that takes it"
        )


def choose_task(dit: DiTConfig, clues: Clues | None = None) -> Choice:
    """The task that a transformer of this architecture was trained for. Raises OptionError."""
    return family_of(dit).choose(dit, clues or Clues())

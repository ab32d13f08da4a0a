"""The families of Wan models. Imports no torch.

One folder for each, with everything that is particular to it; `family` says what a family is. A new one is a folder and
a row here.
"""

from __future__ import annotations

from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.family import Choice, Clues, Family, Task
from wan_core.models.wan.families.wan import WAN

FAMILIES: dict[str, Family] = {family.name: family for family in (WAN,)}


def family_of(of: DiTConfig | Task) -> Family:
    """The family of an architecture or a task."""
    return FAMILIES[of.family]


def choose_task(dit: DiTConfig, clues: Clues | None = None) -> Choice:
    """The task that a transformer of this architecture was trained for. Raises OptionError."""
    return family_of(dit).choose(dit, clues or Clues())

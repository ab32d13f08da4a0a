"""The family `vace`: videos made after a control video, masks and reference pictures, of Wan 2.1 and 2.2.

| file | what it holds |
|---|---|
| `tasks` | the tasks and their defaults |
| `config` | the numbers of an architecture |
| `keys` | the names of parameters in each layout on disk |
| `recognise` | from shapes to an architecture and its task |
| `model` | the transformer (torch) |
| `inputs` | what ComfyUI's CONDITIONING is to the transformer (torch) |
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.family import Family, Inputs
from wan_core.models.wan.families.vace.config import prepared_bytes
from wan_core.models.wan.families.vace.keys import (
    diffusers_modules,
    diffusers_names,
    official_names,
    parameter_names,
)
from wan_core.models.wan.families.vace.recognise import choose, read_config
from wan_core.models.wan.families.vace.tasks import TASKS

if TYPE_CHECKING:
    from wan_core.models.wan.model import WanModel


def _model_class(config: DiTConfig) -> type[WanModel]:
    from wan_core.models.wan.families.vace.model import VaceModel

    return VaceModel


def _inputs(name: str) -> Callable[..., Inputs]:
    """The function `name` of `inputs`, which imports torch, imported when it is called."""
    return lambda *given: getattr(import_module("wan_core.models.wan.families.vace.inputs"), name)(*given)


VACE = Family(
    name="vace",
    tasks=TASKS,
    layouts=(("official", official_names), ("diffusers", diffusers_names)),
    parameter_names=parameter_names,
    lora_modules=diffusers_modules,
    config=read_config,
    choose=choose,
    model_class=_model_class,
    image_inputs=_inputs("image_inputs"),
    conditioning_keys=frozenset({"vace_frames", "vace_mask", "vace_strength"}),
    read_conditioning=_inputs("read_conditioning"),
    prepared_bytes=prepared_bytes,
)

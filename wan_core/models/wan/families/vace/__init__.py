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

from wan_core.models.wan.families.family import Family, class_of, function_of
from wan_core.models.wan.families.vace.config import prepared_bytes
from wan_core.models.wan.families.vace.keys import (
    diffusers_modules,
    diffusers_names,
    official_names,
    parameter_names,
)
from wan_core.models.wan.families.vace.recognise import choose, read_config
from wan_core.models.wan.families.vace.tasks import TASKS

VACE = Family(
    name="vace",
    tasks=TASKS,
    layouts=(("official", official_names), ("diffusers", diffusers_names)),
    parameter_names=parameter_names,
    lora_modules=diffusers_modules,
    config=read_config,
    choose=choose,
    model_class=class_of("vace.model", "VaceModel"),
    image_inputs=function_of("vace.inputs", "image_inputs"),
    conditioning_keys=frozenset({"vace_frames", "vace_mask", "vace_strength"}),
    read_conditioning=function_of("vace.inputs", "read_conditioning"),
    prepared_bytes=prepared_bytes,
)

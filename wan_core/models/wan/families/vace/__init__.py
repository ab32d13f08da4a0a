"""The family `vace`: videos made after a control video, masks and reference pictures, of Wan 2.1 and 2.2.

| file | what it holds |
|---|---|
| `tasks` | the tasks and their defaults |
| `config` | the numbers of an architecture |
| `keys` | the names of parameters in each layout on disk |
| `recognise` | from shapes to an architecture and its task |
| `model` | the transformer (torch) |
| `inputs` | what ComfyUI's CONDITIONING, or the media of a clip, are to the transformer (torch) |
"""

from __future__ import annotations

from wan_core.models.wan.families.clips import ClipRules, MediaRules, whole_latents
from wan_core.models.wan.families.family import Family, class_of, function_of
from wan_core.models.wan.families.vace.config import STRENGTH, prepared_bytes
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
    conditioning_keys=frozenset({"vace_frames", "vace_mask", STRENGTH}),
    branch_keys=frozenset({"vace_frames", "vace_mask", STRENGTH}),
    strength_key=STRENGTH,
    read_conditioning=function_of("vace.inputs", "read_conditioning"),
    prepared_bytes=prepared_bytes,
    clips=ClipRules(overlaps=(5, 1, 9, 13), padded=whole_latents),
    media=MediaRules(
        takes=("control_video", "mask", "outpaint", "reference", "image", "last_image"),
        size_of="given",
        front=("reference",),
        always=("mask",),
    ),
    clip_inputs=function_of("vace.inputs", "clip_inputs"),
)

"""The families of Fun: `fun-control` follows a control video, `camera` the path of a camera. Fun InP has the tensors of
image-to-video and is of the family `wan`.

| file | what it holds |
|---|---|
| `tasks` | the tasks and their defaults |
| `config` | the numbers of an architecture |
| `keys` | the names of parameters on disk |
| `recognise` | from shapes to an architecture and its task |
| `model` | the transformers (torch) |
| `inputs` | what ComfyUI's CONDITIONING, or the media of a clip, are to the transformers (torch) |
| `camera` | the path of a camera, from motions or poses to rays (torch) |
"""

from __future__ import annotations

from wan_core.models.wan.families.clips import ClipRules, MediaRules, whole_latents
from wan_core.models.wan.families.family import Family, function_of
from wan_core.models.wan.families.fun.config import prepared_camera_bytes, prepared_control_bytes
from wan_core.models.wan.families.fun.keys import (
    camera_names,
    camera_parameter_names,
    control_names,
    control_parameter_names,
)
from wan_core.models.wan.families.fun.recognise import choose_camera, choose_control, read_camera, read_control
from wan_core.models.wan.families.fun.tasks import CAMERA_TASKS, CONTROL_TASKS
from wan_core.models.wan.families.wan.keys import diffusers_modules

_IMAGE = {"concat_latent_image", "concat_mask", "clip_vision_output"}

FUN_CONTROL = Family(
    name="fun-control",
    tasks=CONTROL_TASKS,
    layouts=(("official", control_names),),
    parameter_names=control_parameter_names,
    lora_modules=diffusers_modules,
    config=read_control,
    choose=choose_control,
    model_class=function_of("fun.model", "control_class"),
    image_inputs=function_of("fun.inputs", "image_inputs"),
    conditioning_keys=frozenset({*_IMAGE, "concat_mask_index", "reference_latents"}),
    read_conditioning=function_of("fun.inputs", "read_control"),
    prepared_bytes=prepared_control_bytes,
    clips=ClipRules(overlaps=(1,), padded=whole_latents),
    media=MediaRules(
        needs=("control_video",), takes=("reference", "image"), size_of="given", beside=("reference",), seen=("image",)
    ),
    clip_inputs=function_of("fun.inputs", "control_inputs"),
)
FUN_CAMERA = Family(
    name="camera",
    tasks=CAMERA_TASKS,
    layouts=(("official", camera_names),),
    parameter_names=camera_parameter_names,
    lora_modules=diffusers_modules,
    config=read_camera,
    choose=choose_camera,
    model_class=function_of("fun.model", "camera_class"),
    image_inputs=function_of("fun.inputs", "image_inputs"),
    conditioning_keys=frozenset({*_IMAGE, "camera_conditions"}),
    read_conditioning=function_of("fun.inputs", "read_camera"),
    prepared_bytes=prepared_camera_bytes,
    clips=ClipRules(overlaps=(1,), padded=whole_latents),
    media=MediaRules(needs=("camera",), takes=("image",), size_of="given", seen=("image",)),
    clip_inputs=function_of("fun.inputs", "camera_inputs"),
)

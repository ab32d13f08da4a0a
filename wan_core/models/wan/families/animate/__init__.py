"""The family `animate`: Wan2.2-Animate-14B, a picture of a person moved by a pose video and a video of a face.

| file | what it holds |
|---|---|
| `tasks` | the task and its defaults |
| `config` | the numbers of an architecture |
| `keys` | the names of parameters in each layout on disk |
| `recognise` | from shapes to an architecture and its task |
| `model` | the transformer (torch) |
| `motion_encoder`, `face` | what it knows of the face (torch) |
| `inputs` | what ComfyUI's CONDITIONING, or the media of a clip, are to the transformer (torch) |
"""

from __future__ import annotations

from wan_core.models.wan.families.animate.keys import (
    CONSTANT,
    assembled,
    diffusers_names,
    official_names,
    parameter_names,
)
from wan_core.models.wan.families.animate.recognise import choose, read_config
from wan_core.models.wan.families.animate.tasks import TASKS
from wan_core.models.wan.families.clips import ClipRules, MediaRules
from wan_core.models.wan.families.family import Family, class_of, function_of
from wan_core.models.wan.families.wan.keys import diffusers_modules

ANIMATE = Family(
    name="animate",
    tasks=TASKS,
    layouts=(("official", official_names), ("diffusers", diffusers_names)),
    parameter_names=parameter_names,
    constants=CONSTANT,
    assembled=assembled,
    lora_modules=diffusers_modules,
    config=read_config,
    choose=choose,
    model_class=class_of("animate.model", "AnimateModel"),
    image_inputs=function_of("animate.inputs", "image_inputs"),
    conditioning_keys=frozenset(
        {"concat_latent_image", "concat_mask", "clip_vision_output", "pose_video_latent", "face_video_pixels"}
    ),
    read_conditioning=function_of("animate.inputs", "read_conditioning"),
    branch_keys=frozenset({"face_video_pixels"}),
    clips=ClipRules(overlaps=(1, 5), always=True, leading=1),
    media=MediaRules(
        needs=("reference", "pose_video"),
        takes=("face_video", "background", "mask"),
        together=("background", "mask"),
        size_of="pose_video",
        settings=("face_guidance",),
    ),
    clip_inputs=function_of("animate.inputs", "clip_inputs"),
)

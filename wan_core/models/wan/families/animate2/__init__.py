"""The family `animate2`: Wan-Animate-2, a picture of a person moved by a driving video, with the weights of Wan 2.1
image-to-video in shape.

| file | what it holds |
|---|---|
| `tasks` | the tasks and their defaults |
| `config` | the numbers of an architecture |
| `keys` | the names of parameters in each layout on disk |
| `recognise` | from shapes and metadata to an architecture and its task |
| `model` | the transformer: a pass over the driving video, then over the video that is made (torch) |
| `attention` | attention of a frame to all frames and to its driving frame (torch) |
| `inputs` | what ComfyUI's CONDITIONING, or the media of a clip, are to the transformer (torch) |
"""

from __future__ import annotations

from wan_core.models.wan.families.animate2.config import (
    MORE_PER_TOKEN,
    driving_costs,
    padded_frames,
    prepared_bytes,
    prepared_forms,
)
from wan_core.models.wan.families.animate2.keys import (
    comfyui_names,
    diffusers_names,
    official_names,
    parameter_names,
)
from wan_core.models.wan.families.animate2.recognise import METADATA, NAMED, choose, claims, read_config, why_not_sparse
from wan_core.models.wan.families.animate2.tasks import TASKS
from wan_core.models.wan.families.clips import ClipRules, MediaRules
from wan_core.models.wan.families.family import Driving, Family, class_of, function_of
from wan_core.models.wan.families.wan.keys import diffusers_modules

DRIVING = Driving(
    keys=("pose_video_latent", "clip_vision_output_pose", "cross_attn_pose", "pose_strength"),
    inputs=("pose", "pose_image", "pose_context", "pose_strength"),
    own=frozenset({"pose_image", "pose_context"}),
    costs=driving_costs,
)
ANIMATE2 = Family(
    name="animate2",
    tasks=TASKS,
    layouts=(("official", official_names), ("diffusers", diffusers_names), ("comfyui", comfyui_names)),
    parameter_names=parameter_names,
    metadata=METADATA,
    claims=claims,
    named=NAMED,
    prepared_bytes=prepared_bytes,
    prepared_forms=prepared_forms,
    more_per_token=MORE_PER_TOKEN,
    why_not_sparse=why_not_sparse,
    lora_modules=diffusers_modules,
    config=read_config,
    choose=choose,
    model_class=class_of("animate2.model", "Animate2Model"),
    image_inputs=function_of("animate2.inputs", "image_inputs"),
    conditioning_keys=frozenset(
        {"concat_latent_image", "concat_mask", "clip_vision_output", "reference_strength", *DRIVING.keys}
    ),
    read_conditioning=function_of("animate2.inputs", "read_conditioning"),
    driving=DRIVING,
    clips=ClipRules(overlaps=(1,), always=True, leading=1, padded=padded_frames),
    media=MediaRules(
        needs=("reference", "pose_video"),
        size_of="reference",
        resampled=True,
        cropped=True,
        by_area=True,
        seen=("reference", "pose_video"),
        settings=("pose_prompt", "pose_strength", "reference_strength"),
    ),
    clip_inputs=function_of("animate2.inputs", "clip_inputs"),
)

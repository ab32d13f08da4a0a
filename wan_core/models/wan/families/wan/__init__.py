"""The family `wan`: text-to-video, image-to-video and both in one (TI2V), of Wan 2.1 and 2.2.

| file | what it holds |
|---|---|
| `tasks` | the tasks and their defaults |
| `keys` | the names of parameters in each layout on disk |
| `recognise` | from shapes to an architecture, from an architecture to a task |
| `image_model` | the transformer of 2.1 image-to-video, which attends to CLIP features too (torch) |
| `inputs` | what a known image, or ComfyUI's CONDITIONING, is to the transformer (torch) |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.clips import ClipRules
from wan_core.models.wan.families.family import Family, function_of
from wan_core.models.wan.families.wan.keys import diffusers_modules, diffusers_names, official_names, parameter_names
from wan_core.models.wan.families.wan.recognise import choose, read_config
from wan_core.models.wan.families.wan.tasks import TASKS

if TYPE_CHECKING:
    from wan_core.models.wan.model import WanModel


def _model_class(config: DiTConfig) -> type[WanModel]:
    if config.image_dim is None:
        from wan_core.models.wan.model import WanModel

        return WanModel
    from wan_core.models.wan.families.wan.image_model import ImageWanModel

    return ImageWanModel


WAN = Family(
    name="wan",
    tasks=TASKS,
    layouts=(("official", official_names), ("diffusers", diffusers_names)),
    parameter_names=parameter_names,
    lora_modules=diffusers_modules,
    config=read_config,
    choose=choose,
    model_class=_model_class,
    image_inputs=function_of("wan.inputs", "image_inputs"),
    conditioning_keys=frozenset({"concat_latent_image", "concat_mask", "clip_vision_output"}),
    read_conditioning=function_of("wan.inputs", "read_conditioning"),
    stages=True,
    context_windows=True,
    clips=ClipRules(overlaps=(1, 5, 9, 13)),
    clip_inputs=function_of("wan.inputs", "clip_inputs"),
)

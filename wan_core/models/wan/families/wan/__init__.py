"""The family `wan`: text-to-video, image-to-video and both in one (TI2V), of Wan 2.1 and 2.2.

| file | what it holds |
|---|---|
| `data` | the tasks and their defaults, and which of them a transformer was trained for |
| `model` | the transformer of 2.1 image-to-video, which attends to CLIP features too (torch) |
| `inputs` | what a known image, or ComfyUI's CONDITIONING, is to the transformer (torch) |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.clips import Clip, ClipRules
from wan_core.models.wan.families.family import Choice, Clues, Family, Inputs, Task
from wan_core.models.wan.families.wan.data import TASKS, choose_task

if TYPE_CHECKING:
    from torch import Tensor

    from wan_core.models.vae.vae import VideoVAE
    from wan_core.models.wan.model import WanModel


class WanFamily(Family):
    name = "wan"
    tasks = TASKS
    stages = True
    context_windows = True
    layer_pipeline = True
    conditioning_keys = frozenset({"concat_latent_image", "concat_mask", "clip_vision_output"})
    clips = ClipRules(overlaps=(1, 5, 9, 13))

    def choose(self, dit: DiTConfig, clues: Clues) -> Choice:
        return choose_task(dit, clues)

    def model_class(self, config: DiTConfig) -> type[WanModel]:
        if config.image_dim is None:
            from wan_core.models.wan.model import WanModel

            return WanModel
        from wan_core.models.wan.families.wan.model import ImageWanModel

        return ImageWanModel

    def read_conditioning(
        self, task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]
    ) -> Inputs:
        from wan_core.models.wan.families.wan.inputs import read_conditioning

        return read_conditioning(task, vae, extras, latent)

    def clip_inputs(
        self, task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
    ) -> Inputs:
        from wan_core.models.wan.families.wan.inputs import clip_inputs

        return clip_inputs(task, vae, seen, media, clip)


WAN = WanFamily()

"""The family `animate2`: Wan-Animate-2, a picture of a person moved by a driving video, with the weights of Wan 2.1
image-to-video in shape.

| file | what it holds |
|---|---|
| `data` | the numbers of an architecture, the tasks, the names of parameters, what driving takes |
| `model` | the transformer: a pass over the driving video, then over the video that is made (torch) |
| `attention` | attention of a frame to all frames and to its driving frame (torch) |
| `kept` | where keys and values of the driving video are between steps (torch) |
| `inputs` | what ComfyUI's CONDITIONING, or the media of a clip, are to the transformer (torch) |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from wan_core.config.checks import OptionError, UserError
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import plain
from wan_core.models.wan.families.animate2.data import (
    BASE,
    DISTILLED,
    METADATA,
    MORE_PER_TOKEN,
    NAMED,
    NAMED_DISTILLED,
    TASKS,
    Animate2Config,
    comfyui_names,
    diffusers_names,
    driving_costs,
    official_names,
    padded_frames,
    prepared_bytes,
    prepared_forms,
)
from wan_core.models.wan.families.clips import Clip, ClipRules, MediaRules
from wan_core.models.wan.families.family import Choice, Clues, Driving, Family, Inputs, Task
from wan_core.models.wan.families.plain import Shapes
from wan_core.models.wan.prepared_form import PreparedForm

if TYPE_CHECKING:
    from torch import Tensor

    from wan_core.models.vae.vae import VideoVAE
    from wan_core.models.wan.model import WanModel


class Animate2Family(Family):
    name = "animate2"
    tasks = TASKS
    layouts = (("official", official_names), ("diffusers", diffusers_names), ("comfyui", comfyui_names))
    metadata = METADATA
    named = NAMED
    more_per_token = MORE_PER_TOKEN
    driving = Driving(
        keys=("pose_video_latent", "clip_vision_output_pose", "cross_attn_pose", "pose_strength"),
        inputs=("pose", "pose_image", "pose_context", "pose_strength"),
        own=frozenset({"pose_image", "pose_context"}),
        costs=driving_costs,
    )
    conditioning_keys = frozenset(
        {"concat_latent_image", "concat_mask", "clip_vision_output", "reference_strength", *driving.keys}
    )
    clips = ClipRules(overlaps=(1,), always=True, leading=1, padded=padded_frames)
    media = MediaRules(
        needs=("reference", "pose_video"),
        size_of="reference",
        resampled=True,
        cropped=True,
        by_area=True,
        seen=("reference", "pose_video"),
        settings=("pose_prompt", "pose_strength", "reference_strength"),
    )

    def parameter_names(self, names: Collection[str], num_layers: int) -> list[str]:
        return plain.parameter_names([plain.IMAGE_PARAMETER], num_layers)

    def claims(self, metadata: Mapping[str, str]) -> bool:
        return plain.transformer_settings(metadata).get("model_type") == "animate2"

    def read_config(self, shapes: Shapes, metadata: Mapping[str, str]) -> Animate2Config:
        wan = plain.read_config(shapes, metadata)
        if wan.in_channels != 2 * wan.out_channels + 4:
            raise UserError(
                f"a transformer of {wan.in_channels} input channels is none of Animate-2, which takes "
                f"{2 * wan.out_channels + 4}"
            )
        return Animate2Config(**plain.fields_of(wan))

    def choose(self, dit: DiTConfig, clues: Clues) -> Choice:
        """Tensors and metadata are the same for both tasks: the name tells."""
        if not clues.alone:
            raise OptionError("Animate-2 is one transformer for all steps: leave the second file out")
        name = "" if clues.path is None else clues.path.name
        if NAMED_DISTILLED.search(name):
            return Choice(DISTILLED, f"distilled by its name {name}")
        return Choice(BASE, f"its name does not say that it is distilled; if it is, its task is {DISTILLED.name}")

    def model_class(self, config: DiTConfig) -> type[WanModel]:
        from wan_core.models.wan.families.animate2.model import Animate2Model

        return Animate2Model

    def why_not_sparse(self, task: Task) -> str:
        if task.name != DISTILLED.name:
            return ""
        return (
            "distilled weights of Animate-2 scale the scores of one frame, and sparse kernels read blocks as they are: "
            "leave it off"
        )

    def prepared_bytes(self, dit: DiTConfig, latents: tuple[int, ...], itemsize: int) -> int:
        return prepared_bytes(dit, latents, itemsize)

    def prepared_forms(self, dit: DiTConfig, latents: tuple[int, ...], itemsize: int) -> tuple[PreparedForm, ...]:
        return prepared_forms(dit, latents, itemsize)

    def read_conditioning(
        self, task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]
    ) -> Inputs:
        from wan_core.models.wan.families.animate2.inputs import read_conditioning

        return read_conditioning(task, vae, extras, latent)

    def clip_inputs(
        self, task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
    ) -> Inputs:
        from wan_core.models.wan.families.animate2.inputs import clip_inputs

        return clip_inputs(task, vae, seen, media, clip)


ANIMATE2 = Animate2Family()

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

from wan_core.config import Request
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
from wan_core.models.wan.families.clips import Clip, ClipRules
from wan_core.models.wan.families.driven import DrivenFamily
from wan_core.models.wan.families.family import STRENGTHS, Choice, Clues, Inputs, Task, given_fields
from wan_core.models.wan.families.plain import Shapes
from wan_core.models.wan.prepared_form import PreparedForm

if TYPE_CHECKING:
    from torch import Tensor

    from wan_core.media.fit import Box, Pixels
    from wan_core.models.vae.vae import VideoVAE
    from wan_core.models.wan.model import WanModel


class Animate2Family(DrivenFamily):
    name = "animate2"
    tasks = TASKS
    layouts = (("official", official_names), ("diffusers", diffusers_names), ("comfyui", comfyui_names))
    metadata = METADATA
    named = NAMED
    more_per_token = MORE_PER_TOKEN
    driving_keys = ("pose_video_latent", "clip_vision_output_pose", "cross_attn_pose", "pose_strength")
    driving_inputs = ("pose", "pose_image", "pose_context", "pose_strength")
    own_driving_inputs = frozenset({"pose_image", "pose_context"})
    conditioning_keys = frozenset(
        {"concat_latent_image", "concat_mask", "clip_vision_output", "reference_strength", *driving_keys}
    )
    clips = ClipRules(overlaps=(1,), always=True, leading=1, padded=padded_frames)
    seen_fields = ("reference", "pose_video")
    settings = ("pose_prompt", *STRENGTHS)

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

    def driving_costs(self, dit: DiTConfig, latents: tuple[int, int, int]) -> tuple[float, float]:
        return driving_costs(dit, latents)

    def pose_prompt(self, request: Request) -> str | None:
        return request.prompt if request.pose_prompt is None else request.pose_prompt

    def fit(self, pixels: Pixels, size: tuple[int, int]) -> Pixels:
        """With black bars; a picture that gets smaller is averaged, not interpolated."""
        from wan_core.media.fit import fit_with_bars

        return fit_with_bars(pixels, size, by_area=True)

    def shown(self, picture: tuple[int, int], size: tuple[int, int]) -> Box:
        """The bars beside the reference are cut off. Both sides are even, as H.264 needs them."""
        from wan_core.media.fit import Box, fitted_box

        left, top, width, height = fitted_box(picture, size)
        return Box(left, top, max(2, width // 2 * 2), max(2, height // 2 * 2))

    def with_settings(self, request: Request, inputs: Inputs, pose_context: Tensor | None) -> Inputs:
        """Strengths, and the text of the driving video."""
        own: Inputs = {name: getattr(request, name) for name in given_fields(request, STRENGTHS)}
        if pose_context is not None:
            own["pose_context"] = pose_context
        return {**inputs, "inputs": {**inputs["inputs"], **own}}

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

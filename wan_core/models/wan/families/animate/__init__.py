"""The family `animate`: Wan2.2-Animate-14B, a picture of a person moved by a pose video and a video of a face.

| file | what it holds |
|---|---|
| `data` | the numbers of an architecture, the task, the names of parameters |
| `model` | the transformer (torch) |
| `face` | what moves in pictures of a face, and attention to it (torch) |
| `inputs` | what ComfyUI's CONDITIONING, or the media of a clip, are to the transformer (torch) |
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from wan_core.config import Request
from wan_core.config.checks import OptionError, UserError
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import plain
from wan_core.models.wan.families.animate.data import (
    CONSTANT,
    CONVS,
    TASKS,
    AnimateConfig,
    diffusers_names,
    last_conv,
    official_names,
    parameter_names,
)
from wan_core.models.wan.families.clips import Clip, ClipRules
from wan_core.models.wan.families.driven import DrivenFamily
from wan_core.models.wan.families.family import Assembled, Choice, Clues, Inputs, Task
from wan_core.models.wan.families.plain import Shapes

if TYPE_CHECKING:
    from torch import Tensor

    from wan_core.models.vae.vae import VideoVAE
    from wan_core.models.wan.model import WanModel


class AnimateFamily(DrivenFamily):
    name = "animate"
    tasks = TASKS
    layouts = (("official", official_names), ("diffusers", diffusers_names))
    constants = CONSTANT
    conditioning_keys = frozenset(
        {"concat_latent_image", "concat_mask", "clip_vision_output", "pose_video_latent", "face_video_pixels"}
    )
    branch_keys = frozenset({"face_video_pixels"})
    clips = ClipRules(overlaps=(1, 5), always=True, leading=1)
    takes = ("face_video", "background", "mask")
    together = ("background", "mask")
    settings = ("face_guidance",)
    resampled = False

    def parameter_names(self, names: Collection[str], num_layers: int) -> list[str]:
        return parameter_names(names, num_layers)

    def assembled(self, shapes: Shapes) -> Mapping[str, Assembled]:
        """Diffusers splits keys and values of the face into two linears, and its biases of the motion encoder have one
        axis."""
        found: dict[str, Assembled] = {}
        for name, shape in shapes.items():
            if match := re.fullmatch(r"((?:.*\.)?face_adapter\.\d{1,3}\.)to_k\.(weight|bias)", name):
                value = f"{match[1]}to_v.{match[2]}"
                if shapes.get(value) == shape:
                    found[f"{match[1]}to_kv.{match[2]}"] = Assembled((name, value), (2 * shape[0], *shape[1:]))
            elif (
                re.fullmatch(r"(?:.*\.)?motion_encoder\.(conv_in|res_blocks\..+)\.act_fn\.bias", name)
                and len(shape) == 1
            ):
                found[name] = Assembled((name,), (1, shape[0], 1, 1))
        return found

    def read_config(self, shapes: Shapes, metadata: Mapping[str, str]) -> AnimateConfig:
        dim = plain.shape_of(shapes, "patch_embedding.weight", 5)[0]
        head_dim = plain.shape_of(shapes, "face_adapter.fuser_blocks.0.q_norm.weight", 1)[0]
        wan = plain.read_config(shapes, {"num_heads": str(max(1, dim // head_dim)), **metadata})
        stages = range(1, last_conv(shapes))
        outputs = (plain.shape_of(shapes, f"{CONVS}.{n}.conv2.1.weight", 4)[0] for n in stages)
        hidden = plain.shape_of(shapes, "face_encoder.conv2.conv.weight", 3)[0]
        local = plain.shape_of(shapes, "face_encoder.conv1_local.conv.weight", 3)[0]
        if local % hidden:
            raise UserError(f"its face encoder has {local} channels, which {hidden} do not divide.")
        features, directions = plain.shape_of(shapes, "motion_encoder.dec.direction.weight", 2)
        return AnimateConfig(
            **plain.fields_of(wan),
            pose_channels=plain.shape_of(shapes, "pose_patch_embedding.weight", 5)[1],
            motion_channels=(plain.shape_of(shapes, f"{CONVS}.0.0.weight", 4)[0], *outputs),
            motion_features=features,
            motion_directions=directions,
            face_hidden=hidden,
            face_tokens=local // hidden,
        )

    def choose(self, dit: DiTConfig, clues: Clues) -> Choice:
        if not clues.alone:
            raise OptionError("Animate is one transformer for all steps: leave the second file out")
        return Choice(TASKS[0])

    def model_class(self, config: DiTConfig) -> type[WanModel]:
        from wan_core.models.wan.families.animate.model import AnimateModel

        return AnimateModel

    def whole_length(self, request: Request, task: Task) -> tuple[int, int]:
        """All frames of the pose video, at its rate."""
        from wan_core.media.video import video_facts

        assert request.pose_video is not None
        facts = video_facts(request.pose_video)
        return min(240, max(1, round(facts.fps))) if request.fps is None else request.fps, facts.frames

    def own_size(self, request: Request, task: Task, multiple: int) -> tuple[int, int]:
        """The size of the pose video."""
        from wan_core.media.video import video_facts

        assert request.pose_video is not None
        width, height = video_facts(request.pose_video)[:2]
        return max(multiple, width // multiple * multiple), max(multiple, height // multiple * multiple)

    def size_in(self, field: str, dit: DiTConfig, size: tuple[int, int]) -> tuple[int, int]:
        assert isinstance(dit, AnimateConfig)
        return (dit.face_size, dit.face_size) if field == "face_video" else size

    def with_settings(self, request: Request, inputs: Inputs, pose_context: Tensor | None) -> Inputs:
        """Without guidance by the face, both branches have it."""
        if request.face_guidance is not False:
            return inputs
        return {
            **inputs,
            "uncond_inputs": {name: one for name, one in inputs["uncond_inputs"].items() if name != "face"},
        }

    def read_conditioning(
        self, task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]
    ) -> Inputs:
        from wan_core.models.wan.families.animate.inputs import read_conditioning

        return read_conditioning(task, vae, extras, latent)

    def clip_inputs(
        self, task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
    ) -> Inputs:
        from wan_core.models.wan.families.animate.inputs import clip_inputs

        return clip_inputs(task, vae, seen, media, clip)


ANIMATE = AnimateFamily()

"""The families of Fun: `fun-control` follows a control video, `camera` the path of a camera. Fun InP has the tensors of
image-to-video and is of the family `wan`.

| file | what it holds |
|---|---|
| `data` | the numbers of an architecture, the tasks, the names of parameters |
| `model` | the transformers (torch) |
| `inputs` | what ComfyUI's CONDITIONING, or the media of a clip, are to the transformers (torch) |
| `camera` | the path of a camera, from motions or poses to rays (torch) |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wan_core.config import Request
from wan_core.config.checks import OptionError, UserError
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import T2V_1_3B, DiTConfig
from wan_core.models.wan.families import plain
from wan_core.models.wan.families.clips import Clip, ClipRules, whole_latents
from wan_core.models.wan.families.driven import ControlledFamily
from wan_core.models.wan.families.family import Choice, Clues, Hear, Inputs, Task
from wan_core.models.wan.families.fun.data import (
    CAMERA_TASKS,
    CONTROL_TASKS,
    UNSHUFFLED,
    FunCameraConfig,
    FunControlConfig,
    camera_names,
    camera_parameter_names,
    control_names,
    control_parameter_names,
    residual_blocks,
)
from wan_core.models.wan.families.plain import Shapes

IMAGE_KEYS = {"concat_latent_image", "concat_mask", "clip_vision_output"}

if TYPE_CHECKING:
    from torch import Tensor

    from wan_core.models.vae.vae import VideoVAE
    from wan_core.models.wan.families.media import Media
    from wan_core.models.wan.model import WanModel


class FunFamily(ControlledFamily):
    """What both families of Fun share."""

    clips = ClipRules(overlaps=(1,), padded=whole_latents)

    def choose(self, dit: DiTConfig, clues: Clues) -> Choice:
        for task in self.tasks:
            small = task.full_size is not None and task.full_size.dim == T2V_1_3B.dim
            if (task.in_channels, task.image_dim, small) == (dit.in_channels, dit.image_dim, dit.dim == T2V_1_3B.dim):
                if not clues.alone and not task.two_experts:
                    raise OptionError(f"{task.name} is one transformer for all steps: leave the second file out")
                return Choice(task)
        features = "no CLIP features" if dit.image_dim is None else f"CLIP features {dit.image_dim} wide"
        raise OptionError(
            f"a transformer of Fun of {dit.in_channels} input channels and {features} belongs to no known task; name "
            f"one with --task: {', '.join(task.name for task in self.tasks)}"
        )


class FunControlFamily(FunFamily):
    name = "fun-control"
    tasks = CONTROL_TASKS
    layouts = (("official", control_names),)
    conditioning_keys = frozenset({*IMAGE_KEYS, "concat_mask_index", "reference_latents"})
    needs = ("control_video",)
    takes = ("reference", "image")
    beside = ("reference",)

    def parameter_names(self, names: Collection[str], num_layers: int) -> list[str]:
        return control_parameter_names(names, num_layers)

    def read_config(self, shapes: Shapes, metadata: Mapping[str, str]) -> FunControlConfig:
        wan = plain.read_config(shapes, metadata)
        check_channels(wan, (3 * wan.out_channels, 3 * wan.out_channels + 4), "Fun control")
        return FunControlConfig(
            **plain.fields_of(wan), reference_channels=plain.shape_of(shapes, "ref_conv.weight", 4)[1]
        )

    def model_class(self, config: DiTConfig) -> type[WanModel]:
        from wan_core.models.wan.families.fun.model import FunControlModel, ImageFunControlModel

        return FunControlModel if config.image_dim is None else ImageFunControlModel

    def prepared_bytes(self, config: DiTConfig, latents: tuple[int, ...], itemsize: int) -> int:
        """Activations of the reference picture's tokens, for latents [B, C, T, Y, X]: as many as of another frame."""
        B, _, _, Y, X = latents
        return 16 * B * config.tokens(1, Y, X) * config.dim * itemsize

    def read_conditioning(
        self, task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]
    ) -> Inputs:
        from wan_core.models.wan.families.fun.inputs import read_control

        return read_control(task, vae, extras, latent)

    def clip_inputs(
        self, task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
    ) -> Inputs:
        from wan_core.models.wan.families.fun.inputs import control_inputs

        return control_inputs(task, vae, seen, media, clip)


class FunCameraFamily(FunFamily):
    name = "camera"
    tasks = CAMERA_TASKS
    layouts = (("official", camera_names),)
    conditioning_keys = frozenset({*IMAGE_KEYS, "camera_conditions"})
    needs = ("camera",)
    takes = ("image",)

    def parameter_names(self, names: Collection[str], num_layers: int) -> list[str]:
        return camera_parameter_names(names, num_layers)

    def read_config(self, shapes: Shapes, metadata: Mapping[str, str]) -> FunCameraConfig:
        wan = plain.read_config(shapes, metadata)
        check_channels(wan, (2 * wan.out_channels, 2 * wan.out_channels + 4), "Fun camera")
        channels = plain.shape_of(shapes, "control_adapter.conv.weight", 4)[1]
        if channels % UNSHUFFLED**2:
            raise UserError(f"its adapter of the camera takes {channels} channels, no multiple of {UNSHUFFLED**2}.")
        blocks = max(1, residual_blocks(shapes))
        return FunCameraConfig(
            **plain.fields_of(wan), camera_channels=channels // UNSHUFFLED**2, residual_blocks=blocks
        )

    def model_class(self, config: DiTConfig) -> type[WanModel]:
        from wan_core.models.wan.families.fun.model import FunCameraModel, ImageFunCameraModel

        return FunCameraModel if config.image_dim is None else ImageFunCameraModel

    def prepared_bytes(self, config: DiTConfig, latents: tuple[int, ...], itemsize: int) -> int:
        """Tokens of the camera's path."""
        return config.tokens(*latents[2:]) * config.dim * itemsize

    def lengths(self, request: Request, fps: int) -> dict[str, int]:
        from wan_core.models.wan.families.fun.camera import pose_count

        assert request.camera is not None
        count = pose_count(request.camera)
        return {} if count is None else {"the camera": count}

    def load_media(
        self, request: Request, dit: DiTConfig, size: tuple[int, int], fps: int, clip: Clip, hear: Hear
    ) -> Media:
        from wan_core.models.wan.families.fun.camera import camera_rays, pose_count, read_camera

        assert request.camera is not None
        path = read_camera(request.camera, pose_count(request.camera) or clip.end)
        media = super().load_media(request, dit, size, fps, clip, hear)
        return replace(media, more={"camera": lambda clip: camera_rays(path.part(clip.first, clip.end), *size)})

    def read_conditioning(
        self, task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]
    ) -> Inputs:
        from wan_core.models.wan.families.fun.inputs import read_camera

        return read_camera(task, vae, extras, latent)

    def clip_inputs(
        self, task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
    ) -> Inputs:
        from wan_core.models.wan.families.fun.inputs import camera_inputs

        return camera_inputs(task, vae, seen, media, clip)


def check_channels(wan: DiTConfig, channels: tuple[int, int], kind: str) -> None:
    if wan.in_channels not in channels or wan.patch_size[0] != 1:
        raise UserError(
            f"a transformer of {wan.in_channels} input channels and patches of {wan.patch_size[0]} frames is none of "
            f"{kind}, which takes {channels[0]} or {channels[1]} channels and patches of one frame"
        )


FUN_CONTROL, FUN_CAMERA = FunControlFamily(), FunCameraFamily()

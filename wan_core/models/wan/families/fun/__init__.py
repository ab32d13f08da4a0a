"""The families of Fun: `fun-control` follows a control video, `camera` the path of a camera. Fun InP has the tensors of
image-to-video and is of the family `wan`.

| file | what it holds |
|---|---|
| `model` | the transformers (torch) |
| `inputs` | what ComfyUI's CONDITIONING, or the media of a clip, are to the transformers (torch) |
| `camera` | the path of a camera, from motions or poses to rays (torch) |

This file imports no torch.

Source: VideoX-Fun/examples, videox_fun/models/wan_transformer3d.py, wan_camera_adapter.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wan_core.config import Request
from wan_core.config.checks import OptionError, UserError
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.config import I2V_14B, T2V_1_3B, T2V_A14B, DiTConfig
from wan_core.models.wan.families import plain
from wan_core.models.wan.families.clips import Clip, ClipRules, whole_latents
from wan_core.models.wan.families.driven import ControlledFamily
from wan_core.models.wan.families.family import Hear, InputReaders
from wan_core.models.wan.families.plain import Shapes
from wan_core.models.wan.families.task import Choice, Clues, Task, fitting

if TYPE_CHECKING:
    from wan_core.models.wan.families.media import Media
    from wan_core.models.wan.model import WanModel

UNSHUFFLED = 8  # pixels of a side of a camera's picture that become channels: those of a latent


@dataclass(frozen=True, kw_only=True)
class FunControlConfig(DiTConfig):
    """A transformer that takes latents of a control video as channels, and a reference picture as a frame in front."""

    family: str = "fun-control"
    reference_channels: int = 16

    def most_tokens(self, frames: int, rows: int, columns: int) -> int:
        """With those of a reference picture: a frame's."""
        return self.tokens(frames, rows, columns) + self.tokens(1, rows, columns)


@dataclass(frozen=True, kw_only=True)
class FunCameraConfig(DiTConfig):
    """A transformer that takes the path of a camera."""

    family: str = "camera"
    camera_channels: int = 24
    residual_blocks: int = 1


_I2V_1_3B = replace(T2V_1_3B, image_dim=I2V_14B.image_dim)
CONTROL_A14B = FunControlConfig(**{**plain.fields_of(T2V_A14B), "in_channels": 52})
CONTROL_14B = FunControlConfig(**{**plain.fields_of(I2V_14B), "in_channels": 48})
CONTROL_1_3B = FunControlConfig(**{**plain.fields_of(_I2V_1_3B), "in_channels": 48})
CAMERA_A14B = FunCameraConfig(**{**plain.fields_of(T2V_A14B), "in_channels": 36})
CAMERA_14B = FunCameraConfig(**{**plain.fields_of(I2V_14B), "in_channels": 32})
CAMERA_1_3B = FunCameraConfig(**{**plain.fields_of(_I2V_1_3B), "in_channels": 32})


CONTROL = Task(
    name="fun-control-A14B", family="fun-control", release="Wan 2.2", in_channels=52, image="channels",
    driven_by="Wan22FunControlToVideo",
    vae=VAE_21, full_size=CONTROL_A14B, two_experts=True, boundary=0.9, shift=5.0, steps=50,
    guidance_high=6.0, guidance_low=6.0, width=832, height=480, frames=81, fps=16,
)  # fmt: skip
CONTROL_21 = replace(
    CONTROL, name="fun-control-14B", release="Wan 2.1", in_channels=48, image_dim=1280, two_experts=False, boundary=0.0,
    driven_by="WanFunControlToVideo", full_size=CONTROL_14B,
)  # fmt: skip
CAMERA = replace(
    CONTROL, name="camera-A14B", family="camera", in_channels=36, driven_by="WanCameraImageToVideo",
    full_size=CAMERA_A14B,
)  # fmt: skip
CAMERA_21 = replace(
    CAMERA, name="camera-14B", release="Wan 2.1", in_channels=32, image_dim=1280, two_experts=False, boundary=0.0,
    full_size=CAMERA_14B,
)  # fmt: skip
CONTROL_TASKS = (CONTROL, CONTROL_21, replace(CONTROL_21, name="fun-control-1.3B", full_size=CONTROL_1_3B))
CAMERA_TASKS = (CAMERA, CAMERA_21, replace(CAMERA_21, name="camera-1.3B", full_size=CAMERA_1_3B))


_REFERENCE = re.compile(r"ref_conv\.(weight|bias)")
_ADAPTER = re.compile(r"control_adapter\.(?:conv|residual_blocks\.(?P<number>0|[1-9]\d?)\.conv[12])\.(?:weight|bias)")


def control_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout of Fun control, which is ComfyUI's too."""
    return plain.with_own({name: name for name in names if _REFERENCE.fullmatch(name)}, names)


def camera_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout of Fun camera, which is ComfyUI's too."""
    return plain.with_own({name: name for name in names if _ADAPTER.fullmatch(name)}, names)


def residual_blocks(names: Collection[str]) -> int:
    """How many residual blocks the adapter of the camera has."""
    numbers = (match["number"] for name in names if (match := _ADAPTER.fullmatch(name)))
    return max((int(number) + 1 for number in numbers if number is not None), default=0)


IMAGE_KEYS = {"concat_latent_image", "concat_mask", "clip_vision_output"}


class FunFamily(ControlledFamily):
    prompts_over_time = True
    clips = ClipRules(overlaps=(1,), padded=whole_latents)

    def choose(self, dit: DiTConfig, clues: Clues) -> Choice:
        task = fitting(self.tasks, dit)[0]
        if not clues.alone and not task.two_experts:
            raise OptionError(f"{task.name} is one transformer for all steps: leave the second file out")
        return Choice(task)


class FunControlFamily(FunFamily):
    name = "fun-control"
    tasks = CONTROL_TASKS
    layouts = (("official", control_names),)
    conditioning_keys = frozenset({*IMAGE_KEYS, "concat_mask_index", "reference_latents"})
    needs = ("control_video",)
    takes = ("reference", "image")
    beside = ("reference",)

    def parameter_names(self, names: Collection[str], num_layers: int) -> list[str]:
        return [*plain.parameter_names(names, num_layers), *plain.with_bias("ref_conv")]

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

    def inputs(self) -> InputReaders:
        from wan_core.models.wan.families.fun.inputs import control_inputs, read_control

        return InputReaders(read_control, control_inputs)


class FunCameraFamily(FunFamily):
    name = "camera"
    tasks = CAMERA_TASKS
    layouts = (("official", camera_names),)
    conditioning_keys = frozenset({*IMAGE_KEYS, "camera_conditions"})
    needs = ("camera",)
    takes = ("image",)

    def parameter_names(self, names: Collection[str], num_layers: int) -> list[str]:
        convs = [
            "conv",
            *(f"residual_blocks.{n}.conv{i}" for n in range(max(1, residual_blocks(names))) for i in (1, 2)),
        ]
        own = plain.with_bias(*(f"control_adapter.{conv}" for conv in convs))
        return [*plain.parameter_names(names, num_layers), *own]

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

    def picture_bytes(self, width: int, height: int, frames: int, given: Collection[str]) -> int:
        """The rays of a camera are six numbers for each pixel, and the first frame counts four times."""
        return width * height * (24 * (frames + 3) + 160) if "camera" in given else 0

    def load_media(
        self, request: Request, dit: DiTConfig, size: tuple[int, int], fps: int, clip: Clip, hear: Hear
    ) -> Media:
        from wan_core.models.wan.families.fun.camera import camera_rays, pose_count, read_camera

        assert request.camera is not None
        path = read_camera(request.camera, pose_count(request.camera) or clip.end)
        media = super().load_media(request, dit, size, fps, clip, hear)
        return replace(media, more={"camera": lambda clip: camera_rays(path.part(clip.first, clip.end), *size)})

    def inputs(self) -> InputReaders:
        from wan_core.models.wan.families.fun.inputs import camera_inputs, read_camera

        return InputReaders(read_camera, camera_inputs)


def check_channels(wan: DiTConfig, channels: tuple[int, int], kind: str) -> None:
    if wan.in_channels not in channels or wan.patch_size[0] != 1:
        raise UserError(
            f"a transformer of {wan.in_channels} input channels and patches of {wan.patch_size[0]} frames is none of "
            f"{kind}, which takes {channels[0]} or {channels[1]} channels and patches of one frame"
        )


FUN_CONTROL, FUN_CAMERA = FunControlFamily(), FunCameraFamily()

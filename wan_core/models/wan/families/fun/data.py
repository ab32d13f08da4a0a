"""What the transformers of Fun are beside an image-to-video transformer: their numbers, their tasks, the names of their
parameters. Imports no torch.

Source: VideoX-Fun/examples, videox_fun/models/wan_transformer3d.py, wan_camera_adapter.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.config import I2V_14B, T2V_1_3B, T2V_A14B, DiTConfig
from wan_core.models.wan.families import plain
from wan_core.models.wan.families.family import Task

UNSHUFFLED = 8  # pixels of a side of a camera's picture that become channels: those of a latent


@dataclass(frozen=True, kw_only=True)
class FunControlConfig(DiTConfig):
    """A transformer that takes latents of a control video as channels, and a reference picture as a frame in front."""

    family: str = "fun-control"
    reference_channels: int = 16

    @property
    def has_mask(self) -> bool:
        """Whether it is told which frames of the start are known: those of Wan 2.2 are."""
        return self.in_channels > 3 * self.out_channels

    def most_tokens(self, frames: int, rows: int, columns: int) -> int:
        """With those of a reference picture: a frame's."""
        return self.tokens(frames, rows, columns) + self.tokens(1, rows, columns)


@dataclass(frozen=True, kw_only=True)
class FunCameraConfig(DiTConfig):
    """A transformer that takes the path of a camera."""

    family: str = "camera"
    camera_channels: int = 24
    residual_blocks: int = 1

    @property
    def has_mask(self) -> bool:
        return self.in_channels > 2 * self.out_channels


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


def control_parameter_names(names: Collection[str], num_layers: int) -> list[str]:
    """Every official parameter name of Fun control."""
    return [*plain.parameter_names(names, num_layers), "ref_conv.weight", "ref_conv.bias"]


def camera_parameter_names(names: Collection[str], num_layers: int) -> list[str]:
    """Every official parameter name of Fun camera."""
    convs = ["conv", *(f"residual_blocks.{n}.conv{i}" for n in range(max(1, residual_blocks(names))) for i in (1, 2))]
    own = [f"control_adapter.{conv}.{kind}" for conv in convs for kind in ("weight", "bias")]
    return [*plain.parameter_names(names, num_layers), *own]

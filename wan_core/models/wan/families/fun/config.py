"""What the transformers of Fun are beside an image-to-video transformer, as plain numbers. Imports no torch.

Source: VideoX-Fun/videox_fun/models/wan_transformer3d.py, wan_camera_adapter.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from wan_core.models.wan.config import I2V_14B, T2V_1_3B, T2V_A14B, DiTConfig

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


def fields_of(config: DiTConfig) -> dict[str, Any]:
    """Its numbers, for a configuration that has more of them."""
    return {
        field.name: getattr(config, field.name) for field in dataclasses.fields(DiTConfig) if field.name != "family"
    }


def prepared_control_bytes(config: DiTConfig, latents: tuple[int, ...], itemsize: int) -> int:
    """Activations of the reference picture's tokens, for latents [B, C, T, Y, X]: as many as of another frame."""
    B, _, _, Y, X = latents
    return 16 * B * config.tokens(1, Y, X) * config.dim * itemsize


def prepared_camera_bytes(config: DiTConfig, latents: tuple[int, ...], itemsize: int) -> int:
    """Tokens of the camera's path."""
    return config.tokens(*latents[2:]) * config.dim * itemsize


_I2V_1_3B = replace(T2V_1_3B, image_dim=I2V_14B.image_dim)
CONTROL_A14B = FunControlConfig(**{**fields_of(T2V_A14B), "in_channels": 52})
CONTROL_14B = FunControlConfig(**{**fields_of(I2V_14B), "in_channels": 48})
CONTROL_1_3B = FunControlConfig(**{**fields_of(_I2V_1_3B), "in_channels": 48})
CAMERA_A14B = FunCameraConfig(**{**fields_of(T2V_A14B), "in_channels": 36})
CAMERA_14B = FunCameraConfig(**{**fields_of(I2V_14B), "in_channels": 32})
CAMERA_1_3B = FunCameraConfig(**{**fields_of(_I2V_1_3B), "in_channels": 32})

"""The transformers of Fun: image-to-video with a reference picture, or with the path of a camera.

Legend: B batch, L tokens, C channels, T/Y/X latent frames, rows, columns.
Source: VideoX-Fun/videox_fun/models/wan_transformer3d.py, wan_camera_adapter.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.families.fun import UNSHUFFLED, FunCameraConfig, FunControlConfig
from wan_core.models.wan.families.wan.model import ImageWanModel
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.prepared_text import PreparedText, for_all, own_inputs, own_rows
from wan_core.models.wan.runners import SINGLE_FORWARD, ForwardInfo


class OwnTokens(NamedTuple):
    """tokens: [B or 1, L, C] of the reference picture or of the camera, or None. videos: of the batch. Fewer rows serve
    several branches of the same videos, one serves all."""

    tokens: Tensor | None
    videos: int

    def rows(self, start: int, stop: int) -> OwnTokens:
        tokens = None if self.tokens is None else own_rows(self.tokens, self.videos, start, stop)
        return OwnTokens(tokens, stop - start)


# -------------------------------------------------------------------------------------------------------------- control


class FunControlModel(WanModel):
    """A `WanModel` that takes latents of a `reference` picture: tokens of a frame in front of the video."""

    config: FunControlConfig

    def __init__(self, config: FunControlConfig) -> None:
        super().__init__(config)
        self.ref_conv = nn.Conv2d(config.reference_channels, config.dim, config.patch_size[1:], config.patch_size[1:])

    def prepare_text(
        self, context: Tensor, image: Tensor | None = None, reference: Tensor | None = None
    ) -> PreparedText:
        """Text rows [B, S, text_dim] -> keys and values of every block, and the tokens of the reference.

        image: CLIP features [B, N, image_dim], for models that take them. reference: normalised latents [1 or B, 16, Y,
        X]; None: no frame stands in front.
        """
        prepared, tokens = super().prepare_text(context, image), None
        if reference is not None:
            weight = self.ref_conv.weight
            tokens = self.ref_conv(reference.to(weight.device, weight.dtype)).flatten(2).transpose(1, 2)
        return prepared._replace(own=OwnTokens(tokens, len(context)))

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor | Sequence[Tensor] | PreparedText,
        info: ForwardInfo = SINGLE_FORWARD,
        **inputs: Any,
    ) -> Tensor:
        """The base class's forward. A reference is one more frame in front of the video, and is cut off at the end."""
        referred = (
            own_inputs(context, OwnTokens).tokens if isinstance(context, PreparedText) else inputs.get("reference")
        )
        if referred is None:
            return super().forward(x, timestep, context, info, **inputs)
        assert timestep.ndim == 1, "no frame is known, each video has one timestep"
        longer = F.pad(x, (0, 0, 0, 0, 1, 0))
        return super().forward(longer, timestep, context, info, **inputs)[:, :, 1:]

    def embed(self, x: Tensor, grid: tuple[int, int, int], text: PreparedText) -> Tensor:
        tokens, own = super().embed(x, grid, text), own_inputs(text, OwnTokens)
        if own.tokens is not None:
            tokens[:, : own.tokens.shape[1]] = for_all(own.tokens, len(tokens), "a reference")
        return tokens


class ImageFunControlModel(FunControlModel, ImageWanModel):
    """The control model of Wan 2.1, which also attends to CLIP features of an `image`."""


# --------------------------------------------------------------------------------------------------------------- camera


class ResidualBlock(nn.Module):
    """x [N, C, Y, X] plus two convolutions of it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(dim, dim, 3, padding=1)
        self.conv2 = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(x)))


class CameraAdapter(nn.Module):
    """Rays of a camera [N, 24, 8 Y, 8 X] -> [N, C, Y / 2, X / 2]."""

    def __init__(self, config: FunCameraConfig) -> None:
        super().__init__()
        patch = config.patch_size[1:]
        self.conv = nn.Conv2d(config.camera_channels * UNSHUFFLED**2, config.dim, patch, patch)
        self.residual_blocks = nn.Sequential(*(ResidualBlock(config.dim) for _ in range(config.residual_blocks)))

    def forward(self, rays: Tensor) -> Tensor:
        return self.residual_blocks(self.conv(F.pixel_unshuffle(rays, UNSHUFFLED)))


class FunCameraModel(WanModel):
    """A `WanModel` that takes the path of a `camera`, which is added to the tokens of the video."""

    config: FunCameraConfig

    def __init__(self, config: FunCameraConfig) -> None:
        super().__init__(config)
        self.control_adapter = CameraAdapter(config)

    def prepare_text(self, context: Tensor, image: Tensor | None = None, camera: Tensor | None = None) -> PreparedText:
        """Text rows [B, S, text_dim] -> keys and values of every block, and the tokens of the camera.

        image: CLIP features [B, N, image_dim], for models that take them. camera: rays [1 or B, 24, T, 8 Y, 8 X]; None:
        the path of the camera is free.
        """
        prepared, tokens = super().prepare_text(context, image), None
        if camera is not None:
            weight = self.control_adapter.conv.weight
            rays = camera.to(weight.device, weight.dtype)
            frames = [self.control_adapter(frame) for frame in rays.unbind(2)]  # one at a time: little memory
            tokens = torch.cat([frame.flatten(2).transpose(1, 2) for frame in frames], 1)
        return prepared._replace(own=OwnTokens(tokens, len(context)))

    def embed(self, x: Tensor, grid: tuple[int, int, int], text: PreparedText) -> Tensor:
        tokens, own = super().embed(x, grid, text), own_inputs(text, OwnTokens)
        if own.tokens is not None:
            tokens += for_all(own.tokens, len(tokens), "a reference")
        return tokens


class ImageFunCameraModel(FunCameraModel, ImageWanModel):
    """The camera model of Wan 2.1, which also attends to CLIP features of an `image`."""

"""The transformers of Fun: image-to-video with a reference picture, or with the path of a camera.

Legend: B batch, L tokens, C channels, T/Y/X latent frames, rows, columns.
Source: VideoX-Fun/videox_fun/models/wan_transformer3d.py, wan_camera_adapter.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.families.fun import UNSHUFFLED, FunCameraConfig, FunControlConfig
from wan_core.models.wan.families.wan.model import ImageWanModel
from wan_core.models.wan.model import WanModel, check_grid
from wan_core.models.wan.prepared_text import PreparedText, for_all, own_inputs, own_rows
from wan_core.models.wan.runners import SINGLE_FORWARD, ForwardInfo


class OwnTokens(NamedTuple):
    """tokens: [B or 1, L, C] of the reference picture or of the camera, or None. grid: what they are of. videos: of the
    batch. Fewer rows serve several branches of the same videos, one serves all."""

    tokens: Tensor | None
    grid: tuple[int, int, int]
    videos: int

    def rows(self, start: int, stop: int) -> OwnTokens:
        tokens = None if self.tokens is None else own_rows(self.tokens, self.videos, start, stop)
        return OwnTokens(tokens, self.grid, stop - start)


def check_rows(tensor: Tensor, shape: Sequence[int | str], videos: int, name: str) -> None:
    """Raise ValueError unless `tensor` has rows for so many videos, and axes of the sizes in `shape`."""
    fits = tensor.ndim == 1 + len(shape) and len(tensor) > 0 and videos % len(tensor) == 0
    if not fits or any(isinstance(n, int) and n != m for n, m in zip(shape, tensor.shape[1:], strict=True)):
        wanted = ", ".join(map(str, shape))
        raise ValueError(
            f"a {name} of {list(tensor.shape)} given for {videos} videos; needed is [1 or batch, {wanted}]"
        )


# -------------------------------------------------------------------------------------------------------------- control


class FunControlModel(WanModel):
    """A `WanModel` that takes latents of a `reference` picture: tokens of a frame in front of the video."""

    input_names: ClassVar[tuple[str, ...]] = ("reference",)
    config: FunControlConfig

    def __init__(self, config: FunControlConfig) -> None:
        super().__init__(config)
        self.ref_conv = nn.Conv2d(config.reference_channels, config.dim, config.patch_size[1:], config.patch_size[1:])

    def prepare_text(
        self, context: Tensor, image: Tensor | None = None, reference: Tensor | None = None
    ) -> PreparedText:
        """Text rows [B, S, text_dim] -> keys and values of every block, and the tokens of the reference.

        image: CLIP features [B, N, image_dim], for models that take them. reference: normalised latents [1 or B, 16, Y,
        X]; None: no frame stands in front. Raises ValueError.
        """
        prepared, own = super().prepare_text(context, image), OwnTokens(None, (0, 0, 0), len(context))
        if reference is not None:
            check_rows(reference, (self.config.reference_channels, "rows", "columns"), len(context), "reference")
            weight = self.ref_conv.weight
            tokens = self.ref_conv(reference.to(weight.device, weight.dtype))
            own = OwnTokens(tokens.flatten(2).transpose(1, 2), (1, *tokens.shape[2:]), len(context))
        return prepared._replace(own=own)

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
        if timestep.ndim > 1:
            raise ValueError("a timestep for each frame given; this model takes one for each video")
        longer = F.pad(x, (0, 0, 0, 0, 1, 0))
        return super().forward(longer, timestep, context, info, **inputs)[:, :, 1:]

    def embed(self, x: Tensor, grid: tuple[int, int, int], text: PreparedText) -> Tensor:
        tokens, own = super().embed(x, grid, text), own_inputs(text, OwnTokens)
        if own.tokens is not None:
            check_grid(own.grid, (1, *grid[1:]), self.config.patch_size, "reference")
            tokens[:, : own.tokens.shape[1]] = for_all(own.tokens, len(tokens), "a reference")
        return tokens


class ImageFunControlModel(FunControlModel, ImageWanModel):
    """The control model of Wan 2.1, which also attends to CLIP features of an `image`."""

    input_names: ClassVar[tuple[str, ...]] = ("image", "reference")


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

    input_names: ClassVar[tuple[str, ...]] = ("camera",)
    config: FunCameraConfig

    def __init__(self, config: FunCameraConfig) -> None:
        super().__init__(config)
        self.control_adapter = CameraAdapter(config)

    def prepare_text(self, context: Tensor, image: Tensor | None = None, camera: Tensor | None = None) -> PreparedText:
        """Text rows [B, S, text_dim] -> keys and values of every block, and the tokens of the camera.

        image: CLIP features [B, N, image_dim], for models that take them. camera: rays [1 or B, 24, T, 8 Y, 8 X]; None:
        the path of the camera is free. Raises ValueError.
        """
        prepared, own = super().prepare_text(context, image), OwnTokens(None, (0, 0, 0), len(context))
        if camera is not None:
            self.check_camera(camera, len(context))
            weight = self.control_adapter.conv.weight
            rays = camera.to(weight.device, weight.dtype)
            frames = [self.control_adapter(frame) for frame in rays.unbind(2)]  # one at a time: little memory
            tokens = torch.cat([frame.flatten(2).transpose(1, 2) for frame in frames], 1)
            own = OwnTokens(tokens, (len(frames), *frames[0].shape[2:]), len(context))
        return prepared._replace(own=own)

    def check_camera(self, camera: Tensor, videos: int) -> None:
        check_rows(camera, (self.config.camera_channels, "frames", "height", "width"), videos, "camera")
        sides = [UNSHUFFLED * side for side in self.config.patch_size[1:]]
        if camera.shape[3] % sides[0] or camera.shape[4] % sides[1]:
            raise ValueError(
                f"a camera of {list(camera.shape)} given; its sizes must be multiples of {sides[0]} pixels"
            )

    def embed(self, x: Tensor, grid: tuple[int, int, int], text: PreparedText) -> Tensor:
        tokens, own = super().embed(x, grid, text), own_inputs(text, OwnTokens)
        if own.tokens is not None:
            check_grid(own.grid, grid, self.config.patch_size, "camera")
            tokens += for_all(own.tokens, len(tokens), "a reference")
        return tokens


class ImageFunCameraModel(FunCameraModel, ImageWanModel):
    """The camera model of Wan 2.1, which also attends to CLIP features of an `image`."""

    input_names: ClassVar[tuple[str, ...]] = ("image", "camera")

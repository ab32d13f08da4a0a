"""The transformer of Wan2.2-Animate-14B: Wan 2.1 image-to-video, driven by a pose video and a video of a face.

The first latent frame is the reference picture's. The pose is added to the tokens of the others, the face is attended
to after every fifth block.

Legend: B batch, L tokens, T/Y/X latent frames, rows, columns, N face tokens of a frame, H heads, D head dim, F face
frames.
Source: Wan2.2/wan/modules/animate/model_animate.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from wan_core.models.wan.families.animate import FACE_EVERY, AnimateConfig
from wan_core.models.wan.families.animate.face import FaceEncoder, FaceFuser, MotionEncoder
from wan_core.models.wan.families.wan.model import ImageWanModel
from wan_core.models.wan.model import patch_product
from wan_core.models.wan.prepared_text import PreparedText
from wan_core.models.wan.runners import BlockInputs


class Driving(NamedTuple):
    """pose: latents [B, 16, T - 1, Y, X], or None. face: keys and values [B, T, N, H, D] for every fuser, or None.
    videos: of the batch. Fewer poses or faces serve several branches of the same videos, one serves all."""

    pose: Tensor | None
    face: Sequence[tuple[Tensor, Tensor]] | None
    videos: int

    def rows(self, start: int, stop: int) -> Driving:
        """Those of the videos start..stop of the batch."""

        def some(x: Tensor) -> Tensor:
            return x[start:stop] if len(x) == self.videos else x

        face = None if self.face is None else [(some(k), some(v)) for k, v in self.face]
        return Driving(None if self.pose is None else some(self.pose), face, stop - start)


class AnimateModel(ImageWanModel):
    """An `ImageWanModel` that takes `pose` latents and pixels of a `face` beside the CLIP features `image`."""

    input_names: ClassVar[tuple[str, ...]] = ("image", "pose", "face")
    config: AnimateConfig

    def __init__(self, config: AnimateConfig) -> None:
        super().__init__(config)
        self.pose_patch_embedding = nn.Conv3d(config.pose_channels, config.dim, config.patch_size, config.patch_size)
        self.motion_encoder = MotionEncoder(config)
        self.face_encoder = FaceEncoder(config)
        fusers = nn.ModuleList(FaceFuser(config) for _ in range(config.face_adapters))
        self.face_adapter = nn.ModuleDict({"fuser_blocks": fusers})

    def prepare_text(
        self, context: Tensor, image: Tensor | None = None, pose: Tensor | None = None, face: Tensor | None = None
    ) -> PreparedText:
        """Text rows [B, S, text_dim] -> keys and values of every block, and what drives the video.

        image: CLIP features [B, N, image_dim] of the reference picture. pose: normalised latents [1 or B, 16, T - 1, Y,
        X]; None: no pose. face: [1 or B, 3, 4 (T - 1) - 3, S, S] in -1..1; None: the face is not attended to. A face
        video that is shorter drives the first frames only. Raises ValueError.
        """
        prepared = super().prepare_text(context, image)
        return prepared._replace(own=Driving(pose, None if face is None else self.prepare_face(face), len(context)))

    def prepare_face(self, face: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pixels [B, 3, F, S, S] -> keys and values [B, T, N, H, D] for every fuser. The reference frame has no face:
        its tokens are zeros."""
        size = self.config.face_size
        if face.ndim != 5 or (face.shape[1], *face.shape[3:]) != (3, size, size):
            raise ValueError(
                f"a face video of {list(face.shape)} given; this model takes [batch, 3, frames, {size}, {size}]"
            )
        weight = self.patch_embedding.weight
        pictures = face.to(weight.device, weight.dtype).transpose(1, 2)  # [B, F, 3, S, S]
        motion = self.motion_encoder(pictures.flatten(0, 1)).unflatten(0, pictures.shape[:2])
        tokens = self.face_encoder(motion)
        tokens = torch.cat([torch.zeros_like(tokens[:, :1]), tokens], dim=1)
        return [fuser.kv(tokens) for fuser in self.fusers]

    @property
    def fusers(self) -> Sequence[FaceFuser]:
        """Those after blocks 0, 5, 10, ..."""
        return cast("Sequence[FaceFuser]", self.face_adapter["fuser_blocks"])

    def embed(self, x: Tensor, grid: tuple[int, int, int], text: PreparedText) -> Tensor:
        """Latents [B, C_in, T, Y, X] -> tokens [B, L, C], with the pose added to those after the first frame."""
        tokens, (T, Y, X) = self.embed_patches(x, grid), grid
        driving = driving_of(text)
        if driving.face is not None and driving.face[0][0].shape[1] > T:
            raise ValueError(f"a face video for {driving.face[0][0].shape[1]} latent frames given, for a video of {T}")
        if driving.pose is not None:
            wanted = (self.config.pose_channels, x.shape[2] - 1, *x.shape[3:])
            if driving.pose.shape[1:] != wanted:
                raise ValueError(
                    f"pose latents of {list(driving.pose.shape)} given; these latents need [batch, "
                    f"{', '.join(map(str, wanted))}]: one frame less than the video, which begins with the reference"
                )
            pose = patch_product(driving.pose.to(tokens.device), self.pose_patch_embedding, (T - 1, Y, X))
            tokens[:, Y * X :] += for_all(pose, len(tokens))
        return tokens

    def run_block(self, layer: int, tokens: Tensor, inputs: BlockInputs, own: object | None = None) -> Tensor:
        tokens = super().run_block(layer, tokens, inputs, own)
        face = driving_of(inputs.text).face
        if face is None or layer % FACE_EVERY:
            return tokens
        order = torch.arange(tokens.shape[1], device=tokens.device) if inputs.order is None else inputs.order
        frame = order // (inputs.grid[1] * inputs.grid[2])
        kv = tuple(for_all(x, len(tokens)) for x in face[layer // FACE_EVERY])
        frame = torch.where(frame < kv[0].shape[1], frame, 0)  # no face there, as in the first frame
        return tokens.add_(self.fusers[layer // FACE_EVERY](tokens, kv, frame))


def for_all(x: Tensor, videos: int) -> Tensor:
    """x [b, ...] repeated for so many videos: several branches of the same ones."""
    if videos % len(x):
        raise ValueError(f"a pose or face for {len(x)} videos given, and {videos} videos")
    return x if len(x) in (1, videos) else x.repeat(videos // len(x), *[1] * (x.ndim - 1))


def driving_of(text: PreparedText) -> Driving:
    assert isinstance(text.own, Driving), "text was prepared by a model of another family"
    return text.own

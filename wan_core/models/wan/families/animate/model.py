"""The transformer of Wan2.2-Animate-14B: Wan 2.1 image-to-video, driven by a pose video and a video of a face.

The first latent frame is the reference picture's. The pose is added to the tokens of the others, the face is attended
to after every fifth block.

Legend: B batch, L tokens, T/Y/X latent frames, rows, columns, N face tokens of a frame, H heads, D head dim, F face
frames.
Source: Wan2.2/wan/modules/animate/model_animate.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.families.animate import FACE_EVERY, AnimateConfig
from wan_core.models.wan.families.frames import EPS, CausalConv, activated, attend_to_frames, normed
from wan_core.models.wan.families.wan.model import ImageWanModel
from wan_core.models.wan.model import patch_product
from wan_core.models.wan.prepared_text import PreparedText, for_all, own_inputs, own_rows
from wan_core.models.wan.runners import BlockInputs
from wan_core.ops.quant.linear import Linear

AT_ONCE = 8  # pictures
BLUR = (1.0, 3.0, 3.0, 1.0)


class ScaledConv(nn.Module):
    """A convolution without bias, whose weights are stored sqrt(fan in) larger than they are used."""

    def __init__(self, in_channels: int, out_channels: int, side: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, side, side))
        self.scale = (in_channels * side**2) ** -0.5
        self.stride, self.padding = stride, padding

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.scale, stride=self.stride, padding=self.padding)


class ScaledLinear(nn.Module):
    """A linear, whose weights are stored sqrt(fan in) larger than they are used."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.weight.shape[1] ** -0.5, self.bias)


class Activation(nn.Module):
    """A bias, then a leaky ReLU that keeps the variance."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x + self.bias, 0.2) * math.sqrt(2)


class Blur(nn.Module):
    """A low-pass filter before a convolution with a stride of two. Files may hold its kernel, the same in all."""

    def __init__(self, padding: int) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        line = torch.tensor(BLUR, dtype=x.dtype, device=x.device) / sum(BLUR)
        kernel = torch.outer(line, line).expand(x.shape[1], 1, -1, -1)
        return F.conv2d(x, kernel, padding=self.padding, groups=x.shape[1])


class Stage(nn.Module):
    """[N, C, S, S] -> [N, C', S / 2, S / 2]."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(ScaledConv(in_channels, in_channels, 3, padding=1), Activation(in_channels))
        self.conv2 = nn.Sequential(
            Blur(2), ScaledConv(in_channels, out_channels, 3, stride=2), Activation(out_channels)
        )
        self.skip = nn.Sequential(Blur(1), ScaledConv(in_channels, out_channels, 1, stride=2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv2(self.conv1(x)) + self.skip(x)) / math.sqrt(2)


class Appearance(nn.Module):
    """Pictures [N, 3, S, S] -> [N, F]."""

    def __init__(self, channels: tuple[int, ...], features: int) -> None:
        super().__init__()
        first = nn.Sequential(ScaledConv(3, channels[0], 1), Activation(channels[0]))
        stages = (Stage(*pair) for pair in pairwise(channels))
        self.convs = nn.ModuleList([first, *stages, ScaledConv(channels[-1], features, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x)
        return x.flatten(1)


class Directions(nn.Module):
    """Lengths [N, D] -> the sum of orthogonal directions of those lengths, [N, F]."""

    def __init__(self, features: int, directions: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, directions))

    def forward(self, lengths: Tensor) -> Tensor:
        # float32, and the signs that the decomposition gives: the lengths were trained with them.
        orthogonal = torch.linalg.qr(self.weight.float() + 1e-8).Q
        return (lengths.float() @ orthogonal.T).to(lengths.dtype)


class MotionEncoder(nn.Module):
    """Pictures [N, 3, S, S] in -1..1 -> motion [N, F]."""

    def __init__(self, config: AnimateConfig) -> None:
        super().__init__()
        features, directions = config.motion_features, config.motion_directions
        widths = [*[(features, features)] * 4, (features, directions)]
        self.enc = nn.ModuleDict(
            {
                "net_app": Appearance(config.motion_channels, features),
                "fc": nn.Sequential(*(ScaledLinear(*pair) for pair in widths)),
            }
        )
        self.dec = nn.ModuleDict({"direction": Directions(features, directions)})

    def forward(self, pictures: Tensor) -> Tensor:
        encode, direction = self.enc["net_app"], self.dec["direction"]
        found = [encode(some) for some in pictures.split(AT_ONCE)]
        return cast(Tensor, direction(self.enc["fc"](torch.cat(found))))


class FaceEncoder(nn.Module):
    """Motion [B, F, features] -> tokens [B, T - 1, N, C], F = 4 (T - 1) - 3."""

    def __init__(self, config: AnimateConfig) -> None:
        super().__init__()
        hidden, self.tokens = config.face_hidden, config.face_tokens
        self.conv1_local = CausalConv(config.motion_features, hidden * self.tokens)
        self.conv2 = CausalConv(hidden, hidden, stride=2)
        self.conv3 = CausalConv(hidden, hidden, stride=2)
        self.out_proj = Linear(hidden, config.dim)
        self.padding_tokens = nn.Parameter(torch.zeros(1, 1, 1, config.dim))

    def forward(self, motion: Tensor) -> Tensor:
        x = self.conv1_local(motion.transpose(1, 2))
        x = activated(x.unflatten(1, (self.tokens, -1)).flatten(0, 1))  # [B * 4, hidden, F]
        x = activated(self.conv3(activated(self.conv2(x))))
        x = self.out_proj(x.transpose(1, 2)).unflatten(0, (-1, self.tokens)).transpose(1, 2)  # [B, T - 1, 4, C]
        return torch.cat([x, self.padding_tokens.expand(*x.shape[:2], -1, -1)], dim=2)


class FaceFuser(nn.Module):
    """Attention of video tokens to the face tokens of their latent frame."""

    def __init__(self, config: AnimateConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.linear1_kv = Linear(config.dim, 2 * config.dim)
        self.linear1_q = Linear(config.dim, config.dim)
        self.linear2 = Linear(config.dim, config.dim)
        self.q_norm = nn.RMSNorm(config.head_dim, EPS)
        self.k_norm = nn.RMSNorm(config.head_dim, EPS)

    def kv(self, face: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, N, H, D] of face tokens [B, T, N, C]. They do not depend on the step."""
        k, v = self.linear1_kv(normed(face)).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        return _head_norm(k, self.k_norm.weight), v

    def forward(self, tokens: Tensor, kv: tuple[Tensor, Tensor], frame: Tensor) -> Tensor:
        """tokens [B, L, C] of the latent frames `frame` [L], kv of `kv` -> what is to be added to them, [B, L, C]."""
        q = _head_norm(self.linear1_q(normed(tokens)).unflatten(-1, (self.heads, -1)), self.q_norm.weight)
        return self.linear2(attend_to_frames(q, *kv, frame))


def _head_norm(x: Tensor, weight: Tensor) -> Tensor:
    """[..., H, D], each head divided by its root mean square, in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return wide.to(x.dtype) * weight.to(x.dtype)


class Driving(NamedTuple):
    """pose: latents [B, 16, T - 1, Y, X], or None. face: keys and values [B, T, N, H, D] for every fuser, or None.
    videos: of the batch. Fewer poses or faces serve several branches of the same videos, one serves all."""

    pose: Tensor | None
    face: Sequence[tuple[Tensor, Tensor]] | None
    videos: int

    def rows(self, start: int, stop: int) -> Driving:
        some = partial(own_rows, videos=self.videos, start=start, stop=stop)
        face = None if self.face is None else [(some(k), some(v)) for k, v in self.face]
        return Driving(None if self.pose is None else some(self.pose), face, stop - start)


class AnimateModel(ImageWanModel):
    """An `ImageWanModel` that takes `pose` latents and pixels of a `face` beside the CLIP features `image`."""

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
        """Pixels [B, 3, F, S, S] -> keys and values [B, T, N, H, D] for every fuser; zeros for the reference frame."""
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
        tokens, (T, Y, X) = self.embed_patches(x), grid
        driving = own_inputs(text, Driving)
        if driving.face is not None and driving.face[0][0].shape[1] > T:
            raise ValueError(f"a face video for {driving.face[0][0].shape[1]} latent frames given, for a video of {T}")
        if driving.pose is not None:
            pose = patch_product(driving.pose.to(tokens.device), self.pose_patch_embedding)
            tokens[:, Y * X :] += for_all(pose, len(tokens), "a pose")
        return tokens

    def run_block(self, layer: int, tokens: Tensor, inputs: BlockInputs, own: object | None = None) -> Tensor:
        tokens = super().run_block(layer, tokens, inputs, own)
        face = own_inputs(inputs.text, Driving).face
        if face is None or layer % FACE_EVERY:
            return tokens
        order = torch.arange(tokens.shape[1], device=tokens.device) if inputs.order is None else inputs.order
        frame = order // (inputs.grid[1] * inputs.grid[2])
        kv = tuple(for_all(x, len(tokens), "a face") for x in face[layer // FACE_EVERY])
        frame = torch.where(frame < kv[0].shape[1], frame, 0)  # no face there, as in the first frame
        return tokens.add_(self.fusers[layer // FACE_EVERY](tokens, kv, frame))

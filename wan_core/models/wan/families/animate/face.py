"""FACE"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.families.animate import AnimateConfig
from wan_core.models.wan.layers import RMSNorm
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
    """A low-pass filter before a convolution that leaves every other pixel out. Files may hold its kernel, which is the
    same in all of them."""

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


EPS = 1e-6


class CausalConv(nn.Module):
    """A convolution over time [B, C, F], with the first frame repeated in front."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, 3, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (2, 0), mode="replicate"))


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
        x = _activated(x.unflatten(1, (self.tokens, -1)).flatten(0, 1))  # [B * 4, hidden, F]
        x = _activated(self.conv3(_activated(self.conv2(x))))
        x = self.out_proj(x.transpose(1, 2)).unflatten(0, (-1, self.tokens)).transpose(1, 2)  # [B, T - 1, 4, C]
        return torch.cat([x, self.padding_tokens.expand(*x.shape[:2], -1, -1)], dim=2)


def _activated(x: Tensor) -> Tensor:
    """[B, C, F], normalised over its channels, through SiLU."""
    return F.silu(_normed(x.transpose(1, 2))).transpose(1, 2)


def _normed(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


class FaceFuser(nn.Module):
    """Attention of video tokens to the face tokens of their latent frame."""

    def __init__(self, config: AnimateConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.linear1_kv = Linear(config.dim, 2 * config.dim)
        self.linear1_q = Linear(config.dim, config.dim)
        self.linear2 = Linear(config.dim, config.dim)
        self.q_norm = RMSNorm(config.head_dim, EPS)
        self.k_norm = RMSNorm(config.head_dim, EPS)

    def kv(self, face: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, T, N, H, D] of face tokens [B, T, N, C]. They do not depend on the step."""
        k, v = self.linear1_kv(_normed(face)).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        return _head_norm(k, self.k_norm), v

    def forward(self, tokens: Tensor, kv: tuple[Tensor, Tensor], frame: Tensor) -> Tensor:
        """tokens [B, L, C] of the latent frames `frame` [L], kv of `kv` -> what is to be added to them, [B, L, C].

        A frame's tokens need not stand together (ranks and sparse attention order them), so all face tokens are keys,
        of which each query sees those of its frame: there are no more than a hundred.
        """
        k, v = kv
        T, N = k.shape[1:3]
        B = tokens.shape[0]
        q = _head_norm(self.linear1_q(_normed(tokens)).unflatten(-1, (self.heads, -1)), self.q_norm)
        own = frame[:, None] == torch.arange(T, device=frame.device).repeat_interleave(N)  # [L, T * N]
        heads = (x.transpose(1, 2) for x in (q, *(x.flatten(1, 2).expand(B, -1, -1, -1) for x in (k, v))))
        out = F.scaled_dot_product_attention(*heads, attn_mask=own)
        return self.linear2(out.transpose(1, 2).flatten(-2))


def _head_norm(x: Tensor, norm: RMSNorm) -> Tensor:
    """[..., H, D], each head divided by its root mean square, in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return wide.to(x.dtype) * norm.weight.to(x.dtype)

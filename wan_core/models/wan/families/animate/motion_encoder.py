"""The motion encoder of Animate: pictures of a face -> what moves in them.

A convolutional network makes a vector of each picture, a chain of linears the lengths of motions along fixed orthogonal
directions, and their sum is the result.

Legend: N pictures, C channels, S side of a picture in pixels.
Source: Wan2.2/wan/modules/animate/motion_encoder.py, which follows LIA (arXiv 2203.09043).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.families.animate.config import AnimateConfig

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

"""Colours of a part of a video, matched to those of its first part: against drift from clip to clip.

The mean and the deviation of each channel become those of the first part. On latents these are the channels of the VAE,
on pictures those of CIELAB, in which light and colour are apart.

Legend: C channels, F/H/W video frames, height, width, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
_WHITE = (0.9505, 1.0, 1.089)  # D65


def statistics(channels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel [C, 1, ...] of [C, ...], float32."""
    flat = channels.float().flatten(1)
    shape = (-1, *[1] * (channels.ndim - 1))
    return flat.mean(1).view(shape), flat.std(1, unbiased=False).view(shape)


def matched(channels: Tensor, first: tuple[Tensor, Tensor], strength: float) -> Tensor:
    """`channels` [C, ...] with the mean and deviation `first` of another part, by so much: 0 changes nothing."""
    (mean, deviation), (wanted, spread) = statistics(channels), first
    moved = (channels - mean) * (spread / deviation.clamp(min=1e-6)) + wanted
    return torch.lerp(channels.float(), moved, strength)


def lab(rgb: Tensor) -> Tensor:
    """sRGB 0..1 [..., 3] -> CIELAB under D65, where equal distances look about equally different."""
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055).clamp(min=0) ** 2.4)
    xyz = linear @ rgb.new_tensor(_TO_XYZ).T / rgb.new_tensor(_WHITE)
    f = torch.where(xyz > 216 / 24389, xyz.clamp(min=1e-6) ** (1 / 3), (24389 / 27 * xyz + 16) / 116)
    x, y, z = f.unbind(-1)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], dim=-1)


def rgb_of(colours: Tensor) -> Tensor:
    """The inverse of `lab`, with colours that no screen shows cut to 0..1."""
    light, a, b = colours.unbind(-1)
    y = (light + 16) / 116
    f = torch.stack([y + a / 500, y, y - b / 200], dim=-1)
    xyz = torch.where(f > 6 / 29, f.clamp(min=0) ** 3, (116 * f - 16) * 27 / 24389) * colours.new_tensor(_WHITE)
    linear = (xyz @ torch.linalg.inv(colours.new_tensor(_TO_XYZ)).T).clamp(0, 1)
    return torch.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear.clamp(min=1e-8) ** (1 / 2.4) - 0.055)

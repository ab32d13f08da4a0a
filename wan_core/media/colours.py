"""CIELAB: light and two axes of colour, apart from each other, where equal distances look about equally different.

Under the white of screens, D65. Pictures are [..., 3], sRGB in 0..1.
"""

from __future__ import annotations

import torch
from torch import Tensor

TO_XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.9505, 1.0, 1.089)  # D65


def lab(rgb: Tensor) -> Tensor:
    """sRGB 0..1 [..., 3] -> CIELAB."""
    linear = torch.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055).clamp(min=0) ** 2.4)
    xyz = linear @ rgb.new_tensor(TO_XYZ).T / rgb.new_tensor(WHITE)
    f = torch.where(xyz > 216 / 24389, xyz.clamp(min=1e-6) ** (1 / 3), (24389 / 27 * xyz + 16) / 116)
    x, y, z = f.unbind(-1)
    return torch.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], dim=-1)


def rgb_of(colours: Tensor) -> Tensor:
    """The inverse of `lab`, with colours that no screen shows cut to 0..1."""
    light, a, b = colours.unbind(-1)
    y = (light + 16) / 116
    f = torch.stack([y + a / 500, y, y - b / 200], dim=-1)
    xyz = torch.where(f > 6 / 29, f.clamp(min=0) ** 3, (116 * f - 16) * 27 / 24389) * colours.new_tensor(WHITE)
    linear = (xyz @ torch.linalg.inv(colours.new_tensor(TO_XYZ)).T).clamp(0, 1)
    return torch.where(linear <= 0.0031308, linear * 12.92, 1.055 * linear.clamp(min=1e-8) ** (1 / 2.4) - 0.055)

"""A rough picture of latents while a video is made: a linear map from latent channels to red, green and blue.

Shapes: B batch, C latent channels, T/Y/X latent frames, rows, columns. Latents here are normalised. The maps of the
two official VAEs are those of ComfyUI (comfy/latent_formats.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor

MIN_SIDE = 256  # pixels of the longer side: smaller previews are enlarged


@dataclass(frozen=True)
class RGBMap:
    """rgb = latents @ factors + bias, where -1..1 is black to full colour."""

    factors: tuple[tuple[float, float, float], ...]  # one row per latent channel
    bias: tuple[float, float, float]

    def pictures(self, latents: Tensor) -> list[Image.Image]:
        """A picture of each latent frame of the first video of [B, C, T, Y, X]; waits for the device."""
        frames = latents[0].float().cpu()  # [C, T, Y, X]
        rgb = torch.einsum("ctyx,cr->tyxr", frames, torch.tensor(self.factors)) + torch.tensor(self.bias)
        return [_enlarged(one) for one in ((rgb + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)]

    def picture(self, latents: Tensor) -> Image.Image:
        """That of the middle frame."""
        middle = latents.shape[2] // 2
        return self.pictures(latents[:, :, middle : middle + 1])[0]


def _enlarged(rgb: Tensor) -> Image.Image:
    """uint8 [Y, X, 3]; small ones are enlarged to `MIN_SIDE`."""
    image = Image.fromarray(rgb.numpy())
    scale = MIN_SIDE / max(image.size)
    return image.resize((round(image.width * scale), round(image.height * scale))) if scale > 1 else image


def map_of_channels(channels: int) -> RGBMap | None:
    """The map of the Wan VAE with so many latent channels: 16 (2.1) or 48 (2.2)."""
    return {16: WAN21, 48: WAN22}.get(channels)


# fmt: off
WAN21 = RGBMap(
    (
        (-0.1299, -0.1692, 0.2932), (0.0671, 0.0406, 0.0442), (0.3568, 0.2548, 0.1747), (0.0372, 0.2344, 0.142),
        (0.0313, 0.0189, -0.0328), (0.0296, -0.0956, -0.0665), (-0.3477, -0.4059, -0.2925), (0.0166, 0.1902, 0.1975),
        (-0.0412, 0.0267, -0.1364), (-0.1293, 0.074, 0.1636), (0.068, 0.3019, 0.1128), (0.0032, 0.0581, 0.0639),
        (-0.1251, 0.0927, 0.1699), (0.006, -0.0633, 0.0005), (0.3477, 0.2275, 0.295), (0.1984, 0.0913, 0.1861),
    ),
    (-0.1835, -0.0868, -0.336),
)
WAN22 = RGBMap(
    (
        (0.0119, 0.0103, 0.0046), (-0.1062, -0.0504, 0.0165), (0.014, 0.0409, 0.0491), (-0.0813, -0.0677, 0.0607),
        (0.0656, 0.0851, 0.0808), (0.0264, 0.0463, 0.0912), (0.0295, 0.0326, 0.059), (-0.0244, -0.027, 0.0025),
        (0.0443, -0.0102, 0.0288), (-0.0465, -0.009, -0.0205), (0.0359, 0.0236, 0.0082), (-0.0776, 0.0854, 0.1048),
        (0.0564, 0.0264, 0.0561), (0.0006, 0.0594, 0.0418), (-0.0319, -0.0542, -0.0637), (-0.0268, 0.0024, 0.026),
        (0.0539, 0.0265, 0.0358), (-0.0359, -0.0312, -0.0287), (-0.0285, -0.1032, -0.1237), (0.1041, 0.0537, 0.0622),
        (-0.0086, -0.0374, -0.0051), (0.039, 0.067, 0.2863), (0.0069, 0.0144, 0.0082), (0.0006, -0.0167, 0.0079),
        (0.0313, -0.0574, -0.0232), (-0.1454, -0.0902, -0.0481), (0.0714, 0.0827, 0.0447), (-0.0304, -0.0574, -0.0196),
        (0.0401, 0.0384, 0.0204), (-0.0758, -0.0297, -0.0014), (0.0568, 0.1307, 0.1372), (-0.0055, -0.031, -0.038),
        (0.0239, -0.0305, 0.0325), (-0.0663, -0.0673, -0.014), (-0.0416, -0.0047, -0.0023), (0.0166, 0.0112, -0.0093),
        (-0.0211, 0.0011, 0.0331), (0.1833, 0.1466, 0.225), (-0.0368, 0.037, 0.0295), (-0.3441, -0.3543, -0.2008),
        (-0.0479, -0.0489, -0.042), (-0.066, -0.0153, 0.08), (-0.0101, 0.0068, 0.0156), (-0.069, -0.0452, -0.0927),
        (-0.0145, 0.0041, 0.0015), (0.0421, 0.0451, 0.0373), (0.0504, -0.0483, -0.0356), (-0.0837, 0.0168, 0.0055),
    ),
    (0.0317, -0.0878, -0.1388),
)
# The embedded VAE: least squares over the encoded latents of drawn clips (one still square of every pair of colours,
# 5 frames of 48x48, `wan_lab.shapes.draw` with seed 0), each latent pixel against the mean colour of its 4x8x8 pixels.
TINY = RGBMap(
    (
        (0.6392, 0.0052, -0.1591), (-0.0911, 0.0648, 0.1784), (0.3827, 0.1529, -0.7485), (0.2874, -0.1338, 0.0882),
        (0.218, 0.2001, -0.4797), (0.2287, -0.5258, -0.0785), (-0.0067, 0.0345, -0.2347), (0.0415, -0.1084, 0.2168),
        (0.1464, 0.1312, -0.1316), (-0.2539, 0.1572, -0.241), (-0.1273, -0.0278, -0.0737), (0.0575, 0.4295, 0.5491),
        (-0.423, 0.0348, 0.2134), (0.067, 0.335, -0.0132), (0.063, 0.1095, 0.0187), (-0.1219, -0.0546, 0.3656),
    ),
    (0.2005, -0.0571, -0.1912),
)
# fmt: on

"""The CLIP ViT-H/14 vision encoder as Wan uses it: the output of the last block but one, without the final norm.

Legend: B batch, N tokens (a class token and the patches), C channels, H/W height, width in pixels.

Source: Wan2.1/wan/modules/clip.py (`use_31_block`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_DIM = 80  # of ViT-H; shapes do not say it


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The part of a CLIP vision transformer that Wan uses: all blocks but the last.

    Source: Wan2.1/wan/modules/clip.py.
    """

    dim: int = 1280
    ffn_dim: int = 5120
    num_layers: int = 31  # that run; files have one more
    patch: int = 14
    tokens: int = 257  # a class token and 16 x 16 patches
    eps: float = 1e-5

    @property
    def num_heads(self) -> int:
        return self.dim // HEAD_DIM

    @property
    def size(self) -> int:
        """Pixels of a side of the picture that it looks at: 224."""
        return round((self.tokens - 1) ** 0.5) * self.patch


VIT_H = VisionConfig()


MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)


class VisionLayer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        dim = config.dim
        self.heads = config.num_heads
        self.norm1 = nn.LayerNorm(dim, config.eps)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.norm2 = nn.LayerNorm(dim, config.eps)
        self.fc1 = nn.Linear(dim, config.ffn_dim)
        self.fc2 = nn.Linear(config.ffn_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, N, C]."""
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionEncoder(nn.Module):
    """Features of an image. Weights come from `wan_core.checkpoint.load.load_vision`."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.cls = nn.Parameter(torch.zeros(config.dim))
        self.positions = nn.Parameter(torch.zeros(config.tokens, config.dim))
        self.patch = nn.Conv2d(3, config.dim, config.patch, config.patch, bias=False)
        self.norm = nn.LayerNorm(config.dim, config.eps)
        self.layers = nn.ModuleList(VisionLayer(config) for _ in range(config.num_layers))

    def forward(self, image: Tensor) -> Tensor:
        """image [B, 3, H, W] in -1..1, of any size: stretched to the encoder's own. Returns [B, N, C]."""
        return self.features(prepared(image, self.config.size))

    def features(self, pixels: Tensor) -> Tensor:
        """Features of an image that `prepared` has resized and normalised."""
        x = self.patch(pixels.to(self.patch.weight)).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], 1, -1), x], 1) + self.positions
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return x


def prepared(image: Tensor, size: int) -> Tensor:
    """[B, 3, H, W] in -1..1 -> [B, 3, size, size] with CLIP's mean and deviation: bicubic without antialiasing and
    without rounding, as in the reference."""
    pixels = F.interpolate(image.float(), (size, size), mode="bicubic", align_corners=False) / 2 + 0.5
    mean, std = (torch.tensor(values, device=image.device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (pixels - mean) / std

"""What a CLIP vision encoder is, as plain numbers. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

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

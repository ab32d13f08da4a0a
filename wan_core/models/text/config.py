"""Configuration of the text encoder, as plain numbers. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """UMT5 encoder. Each layer has its own relative position table. Source: Wan2.2/wan/modules/t5.py."""

    vocab_size: int = 256384
    dim: int = 4096
    dim_attn: int = 4096
    dim_ffn: int = 10240
    num_heads: int = 64
    num_layers: int = 24
    num_buckets: int = 32
    max_distance: int = 128
    eps: float = 1e-6


UMT5_XXL = TextConfig()

"""The causal video VAE: one model for Wan 2.1 and 2.2, streaming in time, tiling in space."""

from __future__ import annotations

from wan_core.vae.tiling import TileSpec
from wan_core.vae.vae import VideoVAE

__all__ = ["TileSpec", "VideoVAE"]

"""Mean and deviation of latents: between what a VAE deals in and what the transformer works on.

Shapes: B batch, z latent channels. Everything is fp32; the statistics are made anew each time, not kept as buffers of a
module, because `module.to(bfloat16)` would round those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan_core.models.vae.config import VAEConfig


def normalise(latents: Tensor, config: VAEConfig) -> Tensor:
    """What the transformer works on: (latents - mean) / std per channel, fp32. [B, z, ...] -> [B, z, ...]."""
    mean, std = _statistics(latents, config)
    return (latents.float() - mean) / std


def denormalise(latents: Tensor, config: VAEConfig) -> Tensor:
    """The inverse of `normalise`, fp32."""
    mean, std = _statistics(latents, config)
    return latents.float() * std + mean


def _statistics(latents: Tensor, config: VAEConfig) -> tuple[Tensor, Tensor]:
    shape = (-1, *[1] * (latents.ndim - 2))
    both = torch.tensor([config.latents_mean, config.latents_std]).to(latents.device, non_blocking=True)
    return both[0].view(shape), both[1].view(shape)

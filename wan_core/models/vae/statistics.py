"""Conversion between un-normalised latents of the VAE and normalised latents of the transformer.

Shapes: B batch, z latent channels. All values are fp32. Mean and standard deviation are no module buffers, because
`module.to(bfloat16)` would round them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan_core.models.vae.config import VAEConfig


def normalise(latents: Tensor, config: VAEConfig) -> Tensor:
    """The transformer's latents: (latents - mean) / std per channel, fp32. [B, z, ...] -> [B, z, ...]."""
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

"""Pictures of latents, decoded at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from wan_core.execution.report import Report
from wan_core.models.vae.vae import VideoVAE
from wan_core.pipeline.decode import collect_images, decode_to, images_shape


def decode_images(
    vae: VideoVAE, latents: Tensor, report: Report, *, dtype: torch.dtype = torch.float32, **how: Any
) -> Tensor:
    """Un-normalised latents [B, C, T, Y, X] -> pictures [B * F, H, W, 3] on the CPU. how: of `decode_to`."""
    images = torch.empty(images_shape(vae.config, latents), dtype=dtype)
    return decode_to(vae, latents, report, partial(collect_images, images=images), dtype=dtype, **how)

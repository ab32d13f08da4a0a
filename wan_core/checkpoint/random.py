"""Models of any architecture with random weights, made on the device: for measuring speed and memory without files."""

from __future__ import annotations

import torch
from torch import nn

from wan_core.checkpoint.detect import Config, empty_module


@torch.no_grad()
def random_module(config: Config, *, device: str | torch.device, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """The module that `config` describes, in eval mode, with values drawn on `device`, the same for the same seed.

    Matrices keep the variance of what passes through them, so that activations stay finite through all layers; norms
    are one.
    """
    module = empty_module(config).to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, value in module.named_parameters():
        if value.ndim == 1 or "modulation" in name or "gamma" in name:
            value.fill_(0.0 if name.endswith("bias") else 1.0)
            if "modulation" in name:
                value.normal_(std=value.shape[-1] ** -0.5, generator=generator)
        else:
            fan_in = value[0].numel() if "embedding.weight" not in name or value.ndim == 5 else 1
            value.normal_(std=fan_in**-0.5, generator=generator)
    return module.requires_grad_(False).eval()

"""Speed and memory applied to a plain model from outside, in one order.

The order: what replaces a linear comes first, because everything later wraps what it finds; attention next, so that
parallelism can decorate the backend that was chosen; what wraps `run_blocks` after that; compilation last, over the
finished whole.
"""

from __future__ import annotations

import torch

from wan_core.attention.registry import Attend
from wan_core.model.dit import WanModel
from wan_core.vae import VideoVAE


def optimize(model: WanModel, *, attend: Attend) -> WanModel:
    """Apply the options to `model` in place and return it. Parameter names do not change."""
    for block in model.blocks:
        block.self_attn.attend = attend
    return model


def optimize_vae(vae: VideoVAE, device: torch.device) -> VideoVAE:
    """On a GPU the convolutions run channels-last: faster, and less memory. In place; returns `vae`."""
    return vae.channels_last() if device.type == "cuda" else vae

"""Speed and memory applied to a plain model from outside, in one order.

The order: what replaces a linear comes first, because everything later wraps what it finds; attention next, so that
parallelism can decorate the backend that was chosen; what wraps `run_blocks` after that; compilation last, over the
finished whole.
"""

from __future__ import annotations

import torch

from wan_core.attention.registry import Attend
from wan_core.kernels import fused
from wan_core.model.dit import WanModel
from wan_core.vae import VideoVAE


def optimize(model: WanModel, *, attend: Attend, compile: str = "off") -> WanModel:
    """Apply the options to `model` in place and return it. Parameter names do not change.

    Linears are quantised where weights are read (`load_dit`), so that both precisions never exist side by side.
    """
    for block in model.blocks:
        block.self_attn.attend = attend
    if compile == "blocks":
        compile_blocks(model)
    return model


def compile_blocks(model: WanModel) -> None:
    """Compile the block: once for all blocks of both experts, whatever the length of the sequence.

    The blocks are the same code with other weights, and weights are inputs of what is compiled. `fullgraph`: what would
    break the graph raises.
    """
    fused.prepare(model.patch_embedding.weight.device)
    for block in model.blocks:
        block.compile(dynamic=True, fullgraph=True)


def compilations() -> int:
    """Graphs that torch has compiled in this process so far."""
    from torch._dynamo.utils import counters  # a second to import

    return counters["stats"]["unique_graphs"]


def optimize_vae(vae: VideoVAE, device: torch.device) -> VideoVAE:
    """On a GPU the convolutions run channels-last: faster, and less memory. In place; returns `vae`."""
    return vae.channels_last() if device.type == "cuda" else vae

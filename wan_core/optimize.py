"""Speed and memory applied to a plain model from outside, in one order.

The order: what replaces a linear comes first, because everything later wraps what it finds; attention next, so that
parallelism can decorate the backend that was chosen; what wraps `run_blocks` after that; compilation last, over the
finished whole.
"""

from __future__ import annotations

import torch

from wan_core.attention.registry import Attend
from wan_core.graphs import GraphedBlocks
from wan_core.kernels import fused
from wan_core.model.dit import WanModel
from wan_core.quant.transformer_engine import DelayedState
from wan_core.vae import VideoVAE

VARIANTS = 64  # of a compiled block in one process


def optimize(
    model: WanModel, *, attend: Attend, compile: str = "off", device: torch.device | None = None, graphs: bool = True
) -> WanModel:
    """Apply the options to `model` in place and return it; called again, the new options stand. Parameter names do not
    change.

    device: where it will run, if its weights are elsewhere now. graphs: replay small forwards as CUDA graphs. Linears
    are quantised where weights are read (`load_dit`), so that both precisions never exist side by side.
    """
    device = model.patch_embedding.weight.device if device is None else device
    set_attention(model, attend)
    DelayedState.install(model, device)
    if graphs and device.type == "cuda":
        GraphedBlocks.install(model)
    if compile == "blocks":
        compile_blocks(model, device)
    else:
        for block in model.blocks:
            block._compiled_call_impl = None
    return model


def set_attention(model: WanModel, attend: Attend) -> None:
    """Run self-attention with `attend`. Cross-attention stays with torch: its keys are few and prepared once."""
    for block in model.blocks:
        block.self_attn.attend = attend


def compile_blocks(model: WanModel, device: torch.device, backend: str = "inductor") -> None:
    """Compile the block: once for all blocks of both experts, whatever the length of the sequence.

    The blocks are the same code with other weights, and weights are inputs of what is compiled. `fullgraph`: what would
    break the graph raises.
    """
    import torch._dynamo  # a second to import

    fused.prepare(device)
    # Precisions, batch sizes and families of models are variants of the same code to torch, which stops after 8. A
    # higher limit changes nothing for others who compile in this process.
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, VARIANTS)
    for block in model.blocks:
        block.compile(dynamic=True, fullgraph=True, backend=backend)


def begin_run(model: WanModel) -> None:
    """Before the first step of a video with `model`: what one run leaves behind must not change the next."""
    DelayedState.reset(model)


def compilations() -> int:
    """Graphs that torch has compiled in this process so far."""
    from torch._dynamo.utils import counters  # a second to import

    return counters["stats"]["unique_graphs"]


def optimize_vae(vae: VideoVAE, device: torch.device) -> VideoVAE:
    """On a GPU the convolutions run channels-last: faster, and less memory. In place; returns `vae`."""
    return vae.channels_last() if device.type == "cuda" else vae

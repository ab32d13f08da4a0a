"""Speed and memory applied to a plain model from outside, in one order.

The order: what replaces a linear comes first, because everything later wraps what it finds; attention next, so that
parallelism can wrap the backend that was chosen; the runners around the blocks after that; compilation last, over the
finished whole.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from wan_core.config import OptionError
from wan_core.config.compile_cache import full_disk_explained
from wan_core.models.vae.tiny import TinyVAE
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.layers import PLAIN_PARTS, BlockParts
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs, Place, Run
from wan_core.ops.attention.protocol import Attention
from wan_core.ops.custom_ops import allow_variants
from wan_core.ops.kernels import fused
from wan_core.ops.quant.transformer_engine import DelayedState
from wan_core.parallel.layers import LayerStage, stage_layers
from wan_core.parallel.mesh import RankMesh
from wan_core.parallel.sequence import ShardedTokens, shard_tokens
from wan_core.parallel.vae import Strips

VARIANTS = 64  # of a compiled block in one process


def optimize(
    model: WanModel,
    *,
    attend: Attention,
    compile: str = "off",
    device: torch.device | None = None,
    ranks: RankMesh | None = None,
) -> WanModel:
    """Apply the options to `model` in place and return it; called again, the new options stand. Parameter names do not
    change. `print(model.runners)` shows the chain that it made.

    device: where it will run, if its weights are elsewhere now. ranks: those that share its forwards. Linears are
    quantised where weights are read (`load_dit`), so that both precisions never exist side by side.
    """
    device = model.patch_embedding.weight.device if device is None else device
    model.runners.remove(ShardedTokens)
    model.runners.remove(LayerStage)
    set_attention(model, attend)
    state = DelayedState.install(model, device)
    if state is not None:
        model.runners.add(DelayedScales(state))
    if ranks is not None and ranks.sequence.size > 1:
        shard_tokens(model, ranks, model.own_attention(attend))
    elif ranks is not None and ranks.layers.size > 1:
        model.stage = stage_layers(len(model.blocks), ranks)
        model.runners.add(LayerStage(ranks))
    if compile == "blocks":
        compile_blocks(model, device)
    else:
        for block in model.blocks:
            block.parts = PLAIN_PARTS
    return model


class DelayedScales:
    """The runner that updates the scales of delayed FP8 after every forward."""

    name: ClassVar[str] = "delayed FP8 scales"
    place: ClassVar[Place] = Place.SCALES

    def __init__(self, state: DelayedState) -> None:
        self.state = state

    def __call__(self, inputs: BlockInputs, inner: Run) -> Tensor:
        tokens = inner(inputs)
        self.state.update()
        return tokens


def set_attention(model: WanModel, attend: Attention) -> None:
    """Run self-attention with `attend`. Cross-attention stays with torch: its keys are few and prepared once."""
    assert model.runners.find(ShardedTokens) is None, "ranks share this model: use `optimize`"
    for block in model.blocks:
        block.self_attn.attend = model.own_attention(attend)


def check_compile(compile: str, device: torch.device) -> None:
    """Raise OptionError where `compile` asks for what cannot be done on `device`."""
    reason = None
    if compile != "off" and device.type == "cuda":
        reason = (why := fused.why_not(device)) and f"torch compiles for GPUs with Triton. {why}"
    elif compile != "off" and not any(map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++", "cl"))):
        reason = "torch compiles for a CPU with a C++ compiler, and none is found: install g++ or clang, or set CXX"
    if reason is not None:
        raise OptionError(
            f"compile {compile!r} cannot run on {device}: {reason}. Leave it off: it saves launches only."
        )


def compile_blocks(model: WanModel, device: torch.device, backend: str = "inductor") -> None:
    """Compile the parts of a block before and after attention: once for all blocks of both experts, whatever the
    length of the sequence. Attention itself, which depends on the layer and the step, stays as it is.

    The blocks are the same code with other weights, and weights are inputs of what is compiled. `fullgraph`: what would
    break the graph raises.
    """
    fused.prepare(device)
    allow_variants(VARIANTS)  # precisions, batch sizes and families of models are variants of the same code
    parts = compiled_parts(backend)
    for block in model.blocks:
        # Ranks exchange scales in the part before attention: that stays as it is too.
        agrees = block.self_attn.attend.agree is not None
        block.parts = BlockParts(PLAIN_PARTS.before if agrees else parts.before, parts.after)


@functools.cache
def compiled_parts(backend: str) -> BlockParts:
    """One pair for the process, so that what is compiled is found again."""
    before, after = (
        _constant_floats(torch.compile(part, dynamic=True, fullgraph=True, backend=backend)) for part in PLAIN_PARTS
    )
    return BlockParts(before, after)


def _constant_floats(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled`, for which Python's floats are constants. Where sizes may change (`dynamic`), torch's compiler takes
    those that it finds in modules (epsilons) for something that may, too, and traces all a second time when it sees
    that they cannot. Only inside: others who compile in this process may want it otherwise."""
    from torch._dynamo import config

    def call(*positional: Any, **named: Any) -> Any:
        with full_disk_explained():
            if getattr(config, "specialize_float", True):
                return compiled(*positional, **named)
            config.specialize_float = True
            try:
                return compiled(*positional, **named)
            finally:
                config.specialize_float = False

    return call


def begin_run(model: WanModel) -> None:
    """Before the first step of a video with `model`: what one run leaves behind must not change the next."""
    DelayedState.reset(model)


def compilations() -> int:
    """Graphs that torch has compiled in this process so far."""
    from torch._dynamo.utils import counters  # a second to import

    return counters["stats"]["unique_graphs"]


def optimize_vae(vae: VideoVAE, device: torch.device, ranks: RankMesh | None = None) -> VideoVAE:
    """On a GPU convolutions run channels-last: faster, less memory. `ranks` share the picture. In place."""
    if ranks is not None and not isinstance(vae, TinyVAE):
        vae.strips = None if ranks.world.size == 1 else Strips(ranks.world)
    return vae.channels_last() if device.type == "cuda" else vae

"""Speed and memory applied to a plain model from outside, in one order.

The order: what replaces a linear comes first, because everything later wraps what it finds; attention next, so that
parallelism can decorate the backend that was chosen; what wraps `run_blocks` after that; compilation last, over the
finished whole.
"""

from __future__ import annotations

from wan_core.attention.registry import Attend
from wan_core.model.dit import WanModel


def optimize(model: WanModel, *, attend: Attend) -> WanModel:
    """Apply the options to `model` in place and return it. Parameter names do not change."""
    for block in model.blocks:
        block.self_attn.attend = attend
    return model

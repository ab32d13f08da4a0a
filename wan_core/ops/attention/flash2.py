"""FlashAttention 2 (flash-attn): Ampere and newer. torch carries the same algorithm; this is the library's own build.

Legend and layouts as in sdpa.py. Source: github.com/Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan_core.ops.custom_ops import operator, shapes_of


def _forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import flash_attn_func  # pyright: ignore[reportMissingImports]

    # `return_attn_probs` brings the log-sum-exp; without dropout no matrix of probabilities is made.
    out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True)
    # Some versions round the rows of lse up; out follows the strides of q. Both are promised plain to torch.compile.
    return out.contiguous(), lse[..., : q.shape[1]].contiguous()


@operator("flash2", device_type="cuda")
def flash2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _forward(q, k, v)[0]


@operator("flash2_lse", device_type="cuda")
def flash2_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v)


@shapes_of(flash2)
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(q.shape)


@shapes_of(flash2_lse)
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, length), dtype=torch.float32)

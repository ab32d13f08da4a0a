"""Attention in INT8 by libraries. Both change numbers, and are taken only by name or by `fast`.

SageAttention: q and k in int8 with a scale for each block, K's mean removed. comfy-kitchen: q and k rotated by a
Hadamard matrix, then q, k, v and the probabilities in int8.

Legend and layouts as in sdpa.py. Source: github.com/thu-ml/SageAttention, sageattention/core.py, and
github.com/Comfy-Org/comfy-kitchen, comfy_kitchen/sage_attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan_core.ops.attention.library import Library
from wan_core.ops.custom_ops import refuse_gradients


def sage(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    refuse_gradients("SageAttention", q, k, v)
    from sageattention import sageattn  # pyright: ignore[reportMissingImports]

    with torch.cuda.device(q.device):  # Triton launches on the current device
        return sageattn(q, k, v, tensor_layout="NHD", is_causal=False).contiguous()


KITCHEN = Library("comfy-kitchen", "comfy_kitchen", "int8_attention", "pip install 'comfy-kitchen>=0.2.31'")


def int8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    refuse_gradients("INT8 attention", q, k, v)
    import comfy_kitchen  # pyright: ignore[reportMissingImports]

    with torch.cuda.device(q.device):
        # [B, L, H, D] -> [B, H, L, D], which it reads in any strides with D contiguous
        out = comfy_kitchen.int8_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2)


def why_not_kitchen() -> str | None:
    """None where its compiled kernel is there for the current GPU."""
    reason = KITCHEN.why_not()
    if reason is not None:
        return reason
    import comfy_kitchen  # pyright: ignore[reportMissingImports]

    if not comfy_kitchen.int8_attention_is_available():
        return f"comfy-kitchen is installed without its compiled kernels for this GPU: {KITCHEN.install}"
    return None

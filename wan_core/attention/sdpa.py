"""Attention through torch: its own choice of kernel, or cuDNN's by name.

Legend: B batch, L query tokens, S key tokens, H heads, D head dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v: q [B, L, H, D], k and v [B, S, H, D] -> [B, L, H, D]."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As `sdpa`, held to cuDNN's kernel: raises where cuDNN cannot run rather than falling back to a slower one."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return sdpa(q, k, v)


def math_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The textbook formula in float32, holding the whole [L, S] matrix: what every backend is compared with."""
    weights = (q.transpose(1, 2).float() * q.shape[-1] ** -0.5) @ k.permute(0, 2, 3, 1).float()
    return (weights.softmax(-1) @ v.transpose(1, 2).float()).transpose(1, 2).type_as(v)

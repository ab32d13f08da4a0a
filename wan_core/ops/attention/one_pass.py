"""Our own attention kernels (Triton, Ampere and newer) as backends, and their 8-bit arithmetic in plain torch.

Legend and layouts as in sdpa.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan_core.ops.attention.fp8 import key_mean
from wan_core.ops.attention.sdpa import math_lse
from wan_core.ops.custom_ops import refuse_gradients
from wan_core.ops.kernels.formats import quantize_reference
from wan_core.ops.kernels.reference import hadamard_heads


def triton(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from wan_core.ops.kernels import triton_attention

    refuse_gradients("Triton attention", q, k, v)
    return triton_attention.attention(q, k, v)


def triton_int8(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from wan_core.ops.kernels import triton_attention

    refuse_gradients("Triton attention", q, k, v)
    return triton_attention.attention(q, k, v, centre=key_mean(k))


def triton_8bit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from wan_core.ops.kernels import triton_8bit

    refuse_gradients("Triton attention", q, k, v)
    return triton_8bit.attention(q, k, v, key_mean(k))[0]


def triton_8bit_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from wan_core.ops.kernels import triton_8bit

    refuse_gradients("Triton attention", q, k, v)
    mean = key_mean(k)
    out, lse = triton_8bit.attention(q, k, v, mean)
    taken = (q * mean).sum(-1, dtype=lse.dtype) * q.shape[-1] ** -0.5  # [B, L, H]
    return out, lse + taken.transpose(1, 2)


def int8_reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What `triton_int8` computes, but for bf16 probabilities: q and k, its mean removed, in INT8 with a scale for
    every token, in float32."""
    mean = key_mean(k).float()
    out, lse = math_lse(_rounded(q.float()), _rounded(k.float() - mean), v.float())
    taken = (q.float() * mean).sum(-1) * q.shape[-1] ** -0.5  # [B, L, H]
    return out.to(q.dtype), lse + taken.transpose(1, 2)


def eight_bit_reference(q: Tensor, k: Tensor, v: Tensor, rows: int = 128) -> tuple[Tensor, Tensor]:
    """What `triton_8bit` computes with tiles of `rows` keys, but for probabilities that it rounds to E4M3: both times
    the Hadamard matrix, q with a scale for every token, k, its mean removed, with one for each tile; v in E4M3."""
    mean = key_mean(k).float()
    mixed = hadamard_heads(k.float() - mean)
    keys = torch.cat([_rounded(part, (1, 3)) for part in mixed.split(rows, 1)], 1)
    out, lse = math_lse(_rounded(hadamard_heads(q.float())), keys, quantize_reference(v, "tensor").dequantize())
    taken = (q.float() * mean).sum(-1) * q.shape[-1] ** -0.5
    return out.to(q.dtype), lse + taken.transpose(1, 2)


def _rounded(x: Tensor, dims: tuple[int, ...] = (-1,)) -> Tensor:
    unit = x.abs().amax(dims, keepdim=True).clamp(min=1e-12) / 127
    return (x / unit + 0.5).floor() * unit

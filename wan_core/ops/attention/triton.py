"""Our own attention kernel (Triton, Ampere and newer) and its INT8 arithmetic in plain torch. Dense, and block-sparse
with the means of unselected blocks in the same pass.

Legend and layouts as in sdpa.py.
"""

from __future__ import annotations

from torch import Tensor

from wan_core.ops.attention.fp8 import key_mean
from wan_core.ops.attention.sdpa import math_lse
from wan_core.ops.custom_ops import refuse_gradients


def triton(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from wan_core.ops.kernels import triton_attention

    refuse_gradients("Triton attention", q, k, v)
    return triton_attention.attention(q, k, v)


def triton_int8(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    from wan_core.ops.kernels import triton_attention

    refuse_gradients("Triton attention", q, k, v)
    return triton_attention.attention(q, k, v, centre=key_mean(k))


def int8_reference(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """What `triton_int8` computes, but for bf16 probabilities: q and k, its mean removed, in INT8 with a scale for
    every token, in float32."""
    mean = key_mean(k).float()
    out, lse = math_lse(_rounded(q.float()), _rounded(k.float() - mean), v.float())
    taken = (q.float() * mean).sum(-1) * q.shape[-1] ** -0.5  # [B, L, H]
    return out.to(q.dtype), lse + taken.transpose(1, 2)


def _rounded(x: Tensor) -> Tensor:
    unit = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return (x / unit + 0.5).floor() * unit

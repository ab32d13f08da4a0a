"""The fused operations of a transformer block in plain torch: the reference that tests compare the kernels with, and
the implementation where no kernel runs (CPU, float32, other GPUs).

Legend: B batch, L tokens, C channels, H heads, D head dim, F modulation rows per sample (L is a multiple of F).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.ops.kernels.formats import FP8, FP8_MAX, Quantized


def scaled_norm(x: Tensor, mul: Tensor, add: Tensor, eps: float) -> Tensor:
    """LayerNorm without affine, then * mul + add: float32 [B, L, C] from x [B, L, C] and float32 mul, add
    [1 or B, F, C].

    float32, because the modulation is centred on one and reaches several hundred: bf16 would keep only two digits.
    """
    rows = x.unflatten(1, (mul.shape[1], -1))  # [B, F, L/F, C]
    normed = F.layer_norm(rows.float(), rows.shape[-1:], eps=eps)
    return torch.addcmul(add[:, :, None], normed, mul[:, :, None]).flatten(1, 2)


def residual(x: Tensor, update: Tensor, gate: Tensor | None) -> Tensor:
    """x + update * gate, summed in float32 and rounded once: x, update [B, L, C], gate float32 [B, F, C] or None."""
    if gate is None:
        return x + update
    x_rows, update_rows = (t.unflatten(1, (gate.shape[1], -1)) for t in (x, update))  # [B, F, L/F, C]
    # addcmul promotes inside its kernel: no float32 copies of x and update
    return torch.addcmul(x_rows, update_rows, gate[:, :, None]).flatten(1, 2).type_as(x)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, statistics in float32 (inside torch's kernel)."""
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs of x [B, L, H, D] by `table` [L, 1, D/2, 2] (cos, sin) in float32; returns x's dtype."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))  # [B, L, H, D/2]
    return torch.view_as_real(pairs * torch.view_as_complex(table)).flatten(-2).type_as(x)


def bound_scale(weight: Tensor, factor: float = 1.0) -> Tensor:
    """The FP8 scale [1] that is large enough for every output of an RMSNorm with `weight` [C] and a rotation, times
    `factor`.

    In a row of C numbers with root mean square 1 no number exceeds sqrt(C), and a rotation of pairs keeps their length.
    The bound is usually 10 times too large, which costs no precision: E4M3 has three mantissa bits over 15 powers of
    two.
    """
    return (weight.float().abs().amax() * (factor * math.sqrt(weight.numel()) / FP8_MAX)).reshape(1)


def to_scale(x: Tensor, scale: Tensor) -> Quantized:
    """x divided by `scale` [1] and clamped to the range of E4M3."""
    return Quantized((x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale)

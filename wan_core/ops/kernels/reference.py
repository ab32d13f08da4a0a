"""The fused operations of a transformer block in plain torch: the reference that tests compare the kernels with, and
the implementation where no kernel runs (CPU, float32, other GPUs).

Legend: B batch, L tokens, C channels, H heads, D head dim, F modulation rows per sample (L is a multiple of F).
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.ops.kernels.formats import FP8_MAX
from wan_core.ops.kernels.integer_weights import hadamard


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

    A row of C numbers with root mean square 1 has the length sqrt(C), which rotations of its parts keep, and none of
    its numbers exceeds that.
    The bound is usually 10 times too large, which costs no precision: E4M3 has three mantissa bits over 15 powers of
    two.
    """
    return (weight.float().abs().amax() * (factor * math.sqrt(weight.numel()) / FP8_MAX)).reshape(1)


def length_scale(x: Tensor, factor: float = 1.0) -> Tensor:
    """The FP8 scale [1] that is large enough for x [..., D] whose rows are rotated in any way, times `factor`: for the
    length of the longest one."""
    longest = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax()
    return (longest * (factor / FP8_MAX)).clamp(min=1e-30).reshape(1)


def hadamard_heads(x: Tensor) -> Tensor:
    """x [B, L, H, D] times an orthonormal, symmetric Hadamard matrix [D, D], in x's dtype: applied twice, x again. D
    that has none (see `has_hadamard`): x itself.

    Products of queries and keys stay the same if both are multiplied. A channel that is large in all tokens is spread
    over the channels of its head: otherwise its rounding is most of the error of a score. Source: QuaRot,
    arXiv:2404.00456, FlashAttention-3, arXiv:2407.08608.
    """
    dim = x.shape[-1]
    return (x @ head_signs(dim, x.device, x.dtype)) * dim**-0.5 if has_hadamard(dim) else x


def has_hadamard(dim: int) -> bool:
    return dim >= 8 and dim & (dim - 1) == 0


@functools.cache
def head_signs(dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The matrix of `hadamard_heads`, 1 and -1, times the root of `dim`: exact in every dtype.

    Its rows have equal sums as far as `dim` allows, so that a number that all channels share is spread as well; in
    Sylvester's matrix it all lands in one channel. Cached on the device: a copy from the host cannot be captured into a
    CUDA graph.
    """
    odd = dim.bit_length() % 2 == 0  # powers of two that are no powers of four
    size = dim // 2 if odd else dim
    matrix = hadamard(size, torch.device("cpu"), torch.float32) * size**0.5
    matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]])) if odd else matrix
    return matrix.to(device, dtype)

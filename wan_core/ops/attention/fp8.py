"""Attention in FP8: how q, k and v become E4M3, whatever kernel follows, and the arithmetic in plain torch.

Four things make FP8 attention usable:

- K's mean over the tokens is removed first. A vector added to every key adds the same number to every score of a
  query, which softmax ignores, so any constant vector is exact; the mean is what lets the rest use E4M3's eight binades
  on what differs between keys. Every 32nd token gives a mean that serves as well and costs nothing.
- Queries and keys are multiplied by the same Hadamard matrix, head by head, which leaves their products as they are.
  It spreads channels that are larger than the others: on the embedded model it halves the error (docs/log.md).
- Scales are loose. E4M3's relative error is the same over 15 binades, so queries and keys need no more than a bound:
  the longest row's length, which the matrix keeps. V's scale is a power of two: multiplying a bf16 tensor by it is
  exact, so there is one rounding, to FP8, in one pass.
- The output needs no measured scale: a weighted mean of rows of v is never larger than the largest of them, so v's
  scale cannot overflow.

Legend: B batch, L query tokens, S key tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wan_core.ops.attention.protocol import SINGLE, Attention, AttentionCall
from wan_core.ops.attention.sdpa import math_lse
from wan_core.ops.custom_ops import refuse_gradients
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.formats import FP8, FP8_MAX, Quantized
from wan_core.ops.kernels.fused import K_MEAN_EVERY
from wan_core.ops.kernels.reference import length_scale

Kernel = Callable[[Quantized, Quantized, Quantized], Quantized]
KernelLse = Callable[[Quantized, Quantized, Quantized], tuple[Quantized, Tensor]]

SMALLEST_FP16 = 2.0**-7  # the same where the inverse must be a number in fp16
SMALLEST = 2.0**-100  # largest magnitude assumed of a tensor of zeros: its scale is then a number that has an inverse
EXPONENT = 0x7F800000  # the exponent bits of a float32


class Fp8Attention(Attention):
    """An FP8 kernel behind the protocol of every backend.

    Called with bf16 or fp16 q [B, L, H, D], k and v [B, S, H, D] it quantises them by itself and returns their dtype.
    `quantized` takes FP8 tensors that a fused kernel wrote (per-tensor scales [1], K's mean already removed,
    q and k times the Hadamard matrix) and
    returns FP8 [B, L, H, D], ready for an FP8 output projection. No call waits for the device.
    """

    takes_fp8 = True

    def __init__(self, kernel: Kernel, kernel_lse: KernelLse | None = None, *, capturable: bool = True) -> None:
        """capturable: whether a CUDA graph may hold its launches."""
        self.kernel, self.kernel_lse = kernel, kernel_lse
        self.capturable, self.gives_lse = capturable, kernel_lse is not None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> Tensor:
        refuse_gradients("FP8 attention", q, k, v)
        return _dequantize(self.kernel(quantize_mixed(q), quantize_mixed(k, key_mean(k)), quantize(v)), q.dtype)

    def quantized(self, q: Quantized, k: Quantized, v: Quantized, call: AttentionCall = SINGLE) -> Quantized:
        return self.kernel(q, k, v)

    def quantized_lse(self, q: Quantized, k: Quantized, v: Quantized) -> tuple[Quantized, Tensor]:
        if self.kernel_lse is None:
            return super().quantized_lse(q, k, v)
        return self.kernel_lse(q, k, v)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> tuple[Tensor, Tensor]:
        """Also the log-sum-exp float32 [B, H, L] of the scores with K as given: the mean that was taken from the keys
        is put back, because parts of a sequence that are merged have different means."""
        refuse_gradients("FP8 attention", q, k, v)
        mean = key_mean(k)
        out, lse = self.quantized_lse(quantize_mixed(q), quantize_mixed(k, mean), quantize(v))
        taken = (q * mean).sum(-1, dtype=torch.float32) * q.shape[-1] ** -0.5  # [B, L, H]
        return _dequantize(out, q.dtype), lse + taken.transpose(1, 2)


def key_mean(k: Tensor) -> Tensor:
    """Roughly the mean over tokens of k [B, S, H, D]: [B, 1, H, D] in k's dtype. Rounding it does no harm."""
    return k[:, ::K_MEAN_EVERY].mean(1, keepdim=True, dtype=torch.float32).to(k.dtype)


def quantize_mixed(x: Tensor, mean: Tensor | None = None) -> Quantized:
    """Queries or keys x [B, L, H, D], less `mean` [B, 1, H, D] if given, times the Hadamard matrix, in E4M3."""
    mixed = fused.hadamard_fp8(x, length_scale(x, 1.0 if mean is None else 2.0), mean)
    assert isinstance(mixed, Quantized)
    return mixed


def quantize(x: Tensor) -> Quantized:
    """Values x [B, L, H, D] in E4M3 under one power of two, float32 [1].

    The largest magnitude lands in [64, 256): below 448, with no need to clamp and nothing near the subnormals.
    """
    smallest = SMALLEST_FP16 if x.dtype == torch.float16 else SMALLEST
    amax = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32).clamp(min=smallest)
    scale = (amax.reshape(1).view(torch.int32) & EXPONENT).view(torch.float32) * (2 / 256)  # 2^ceil(log2 amax) / 256
    return Quantized((x * (1 / scale).to(x.dtype)).to(FP8), scale)  # exact


def _dequantize(x: Quantized, dtype: torch.dtype) -> Tensor:
    return x.data.to(dtype) * x.scale.to(dtype)  # exact in bf16: the scale is a power of two


# ------------------------------------------------------------------------------------------------------- the reference


def reference(q: Quantized, k: Quantized, v: Quantized) -> Quantized:
    return reference_lse(q, k, v)[0]


def reference_lse(q: Quantized, k: Quantized, v: Quantized) -> tuple[Quantized, Tensor]:
    """What an FP8 kernel computes: attention of the numbers that q, k and v hold, rounded to E4M3 under v's scale.

    A real kernel also rounds the probabilities to E4M3, which this does not.
    """
    out, lse = math_lse(*(x.dequantize() for x in (q, k, v)))
    return Quantized((out / v.scale).clamp(-FP8_MAX, FP8_MAX).to(FP8), v.scale), lse


def math_fp8() -> Fp8Attention:
    """FP8 attention in plain torch, on any device: for tests."""
    return Fp8Attention(reference, reference_lse)

"""FP8 tensors with scales, and their quantisation in plain torch: the reference for every kernel that quantises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # the largest E4M3 number
BLOCK = 128  # length of a scaled block

Format = Literal["tensor", "row", "block"]
"""Granularity of scales: one for the tensor, one per row (the last dimension), or one per 128 numbers of a row."""


class Quantized(NamedTuple):
    """An FP8 tensor with its scales: value = data * scale.

    data: float8_e4m3fn [..., K]. scale: float32, [1] (tensor), [..., 1] (row) or [..., K / 128] (block).
    """

    data: Tensor
    scale: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        scale = self.scale
        if scale.shape[-1] not in (1, self.data.shape[-1]):
            scale = scale.repeat_interleave(BLOCK, -1)
        return (self.data.float() * scale).to(dtype)


def quantize_reference(x: Tensor, fmt: Format, amax: Tensor | None = None) -> Quantized:
    """x [..., K] quantised: each group is scaled so that its largest number becomes 448, then rounded.

    Groups of zeros get the scale 1e-12 / 448. amax: the largest absolute value for "tensor", if other shards share the
    scale. Raises ValueError if K is not a multiple of 128 for "block".
    """
    values = x.float()
    if fmt == "tensor":
        amax = (values.abs().amax() if amax is None else amax.float()).reshape(1)
    elif fmt == "row":
        amax = torch.maximum(values.amax(-1, keepdim=True), -values.amin(-1, keepdim=True))  # abs() would be a copy
    else:
        if x.shape[-1] % BLOCK:
            raise ValueError(f"rows of {x.shape[-1]} numbers given; blocks need a multiple of {BLOCK}")
        amax = values.abs().unflatten(-1, (-1, BLOCK)).amax(-1)
    scale = amax.clamp(min=1e-12) / FP8_MAX
    spread = scale.repeat_interleave(BLOCK, -1) if fmt == "block" else scale
    return Quantized((values / spread).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale)


def spread_scale(scale: Tensor, shape: torch.Size) -> Tensor:
    """The scale of a weight [N, K] in float32, in a shape that broadcasts to the weight. `scale` has one number for the
    tensor, one per row, or one per 128 x 128 block."""
    scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape([1] * len(shape))
    n, k = shape
    if scale.numel() == n and scale.shape[0] == n:
        return scale.reshape(n, 1)
    return scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]


class BlockFormat(NamedTuple):
    """A GGUF block format. `dequantize`: uint8 [n, bytes] -> float32 [n, numbers]."""

    name: str
    code: int  # ggml's type number
    numbers: int  # numbers per block
    bytes: int  # bytes per block
    dequantize: Callable[[Tensor], Tensor]

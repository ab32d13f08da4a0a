"""The block formats of GGUF files, and their dequantisation in plain torch.

A row of K numbers is stored as K / `numbers` blocks of `bytes` bytes each: small integers with their scales. In the
formats Q4_0 ... Q8_0 a block has 32 numbers and one float16 scale. In the "K" formats it has 256 numbers in 8 or 16
sub-blocks, each with a small integer scale that multiplies the block's float16 scale.

float32 results equal those of the `gguf` package bit for bit; `gguf_triton` gives the same numbers on a GPU.
Source: ggml (https://github.com/ggml-org/ggml), ggml-quants.c and ggml-common.h.

Legend: n blocks. Functions take uint8 [n, bytes] and give float32 [n, numbers].
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from wan_core.ops.custom_ops import operator
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.formats import BlockFormat

CHUNK = 2**22  # numbers dequantised at a time, to keep intermediate tensors small


def unpack_reference(data: Tensor, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., row bytes] uint8 in the format `name` -> [..., K] numbers in `dtype`, by torch."""
    fmt = FORMATS[name]
    blocks = data.reshape(-1, fmt.bytes)
    out = torch.empty((len(blocks), fmt.numbers), dtype=dtype, device=data.device)
    for part, target in zip(blocks.split(CHUNK // fmt.numbers), out.split(CHUNK // fmt.numbers), strict=True):
        target.copy_(fmt.dequantize(part))
    return out.view(*data.shape[:-1], -1)


def _half(pair: Tensor) -> Tensor:
    """Two bytes [n, 2] that hold a float16 -> float32 [n, 1]."""
    return pair.contiguous().view(torch.float16).float()


def _shifts(count: int, like: Tensor) -> Tensor:
    """The shifts that split a byte into `count` equal parts, lowest first: 0, 4 or 0, 2, 4, 6 or 0 ... 7.

    Created on the device, because a copy from the host would synchronise and cannot be captured into a CUDA graph."""
    return torch.arange(0, 8, 8 // count, dtype=torch.uint8, device=like.device)


def _split_bytes(data: Tensor, count: int) -> Tensor:
    """data [..., b] -> [..., count, b]: first the lowest bits of all b bytes, then the next."""
    return (data.unsqueeze(-2) >> _shifts(count, data)[:, None]) & (2 ** (8 // count) - 1)


def _unfolded(data: Tensor, count: int) -> Tensor:
    """data [n, b] -> [n, b * count]: the parts of each byte next to each other, lowest first."""
    return ((data.unsqueeze(-1) >> _shifts(count, data)) & (2 ** (8 // count) - 1)).flatten(1)


def _nibbles(data: Tensor, width: int) -> Tensor:
    """[n, b] -> [n, 2b]: for each `width` bytes first the low 4 bits, then the high 4 bits."""
    return _split_bytes(data.unflatten(-1, (-1, width)), 2).flatten(1)


# ------------------------------------------------------------------------------------------- 32 numbers, one scale each


def _q4_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * (_nibbles(b[:, 2:], 16).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * _nibbles(b[:, 4:], 16).float() + _half(b[:, 2:4])


def _q5_0(b: Tensor) -> Tensor:
    q = _nibbles(b[:, 6:], 16) | (_unfolded(b[:, 2:6], 8) << 4)
    return _half(b[:, :2]) * (q.float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    q = _nibbles(b[:, 8:], 16) | (_unfolded(b[:, 4:8], 8) << 4)
    return _half(b[:, :2]) * q.float() + _half(b[:, 2:4])


def _q8_0(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * b[:, 2:].contiguous().view(torch.int8).float()


# ---------------------------------------------------------------------------------- 256 numbers, scales for sub-blocks


def _six_bit_pairs(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 8 scales and 8 minima of 6 bits that Q4_K and Q5_K pack into 12 bytes: float32 [n, 8] each.

    The first four scales are the low six bits of bytes 0-3, the first four minima those of bytes 4-7. The other four
    have their low four bits in bytes 8-11 (scales in the low half, minima in the high half) and their high two bits in
    the high two bits of bytes 0-3 and 4-7.
    """
    first, second, third = packed.split(4, 1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return scales.float(), minima.float()


def _scaled_and_shifted(b: Tensor, q: Tensor) -> Tensor:
    """Q4_K and Q5_K: q [n, 256] in 8 sub-blocks, each with a scale and a minimum."""
    scales, minima = _six_bit_pairs(b[:, 4:16])
    scale, minimum = _half(b[:, :2]) * scales, _half(b[:, 2:4]) * minima
    return (scale[..., None] * q.float().unflatten(1, (8, 32)) - minimum[..., None]).flatten(1)


def _q4_k(b: Tensor) -> Tensor:
    return _scaled_and_shifted(b, _nibbles(b[:, 16:], 32))


def _q5_k(b: Tensor) -> Tensor:
    high = _split_bytes(b[:, 16:48], 8).flatten(1)  # bit i of byte j belongs to number 32 i + j
    return _scaled_and_shifted(b, _nibbles(b[:, 48:], 32) | (high << 4))


def _q6_k(b: Tensor) -> Tensor:
    high = _split_bytes(b[:, 128:192].unflatten(1, (2, 32)), 4).flatten(1)
    q = (_nibbles(b[:, :128], 64) | (high << 4)).float() - 32
    scale = _half(b[:, 208:]) * b[:, 192:208].contiguous().view(torch.int8).float()
    return (scale[..., None] * q.unflatten(1, (16, 16))).flatten(1)


def _q3_k(b: Tensor) -> Tensor:
    packed = b[:, 96:108]
    low = _split_bytes(packed[:, :8], 2).flatten(1)
    high = _split_bytes(packed[:, 8:], 4).flatten(1)
    scale = _half(b[:, 108:]) * ((low | (high << 4)).float() - 32)
    q = _split_bytes(b[:, 32:96].unflatten(1, (2, 32)), 4).flatten(1)
    raised = _split_bytes(b[:, :32], 8).flatten(1)  # if this bit is not set, 4 is subtracted
    q = q.float() - 4 * (1 - raised.float())
    return (scale[..., None] * q.unflatten(1, (16, 16))).flatten(1)


def _q2_k(b: Tensor) -> Tensor:
    scale = _half(b[:, 80:82]) * (b[:, :16] & 15).float()
    minimum = _half(b[:, 82:]) * (b[:, :16] >> 4).float()
    q = _split_bytes(b[:, 16:80].unflatten(1, (2, 32)), 4).flatten(1).float()
    return (scale[..., None] * q.unflatten(1, (16, 16)) - minimum[..., None]).flatten(1)


# ----------------------------------------------------------------------------- 4-bit indices of a table of 16 values

STEPS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@functools.cache
def _table(device: torch.device) -> Tensor:
    return torch.tensor(STEPS, dtype=torch.float32, device=device)


def _steps(nibbles: Tensor) -> Tensor:
    return _table(nibbles.device)[nibbles.int()]


def _iq4_nl(b: Tensor) -> Tensor:
    return _half(b[:, :2]) * _steps(_nibbles(b[:, 2:], 16))


def _iq4_xs(b: Tensor) -> Tensor:
    """Eight scales of 6 bits: their low four bits are in bytes 4-7, their high two bits in bytes 2-3."""
    scale = _half(b[:, :2]) * ((_unfolded(b[:, 4:8], 2) | (_unfolded(b[:, 2:4], 4) << 4)).float() - 32)
    return (scale[..., None] * _steps(_nibbles(b[:, 8:], 16)).unflatten(1, (8, 32))).flatten(1)


FORMATS: dict[str, BlockFormat] = {
    fmt.name: fmt
    for fmt in (
        BlockFormat("Q4_0", 2, 32, 18, _q4_0),
        BlockFormat("Q4_1", 3, 32, 20, _q4_1),
        BlockFormat("Q5_0", 6, 32, 22, _q5_0),
        BlockFormat("Q5_1", 7, 32, 24, _q5_1),
        BlockFormat("Q8_0", 8, 32, 34, _q8_0),
        BlockFormat("Q2_K", 10, 256, 84, _q2_k),
        BlockFormat("Q3_K", 11, 256, 110, _q3_k),
        BlockFormat("Q4_K", 12, 256, 144, _q4_k),
        BlockFormat("Q5_K", 13, 256, 176, _q5_k),
        BlockFormat("Q6_K", 14, 256, 210, _q6_k),
        BlockFormat("IQ4_NL", 20, 32, 18, _iq4_nl),
        BlockFormat("IQ4_XS", 23, 256, 136, _iq4_xs),
    )
}


# -------------------------------------------------------------------------------------------------------- the operation


def _unpacked(data: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    fmt = FORMATS[name]
    return data.new_empty((*data.shape[:-1], data.shape[-1] // fmt.bytes * fmt.numbers), dtype=dtype)


@operator("gguf_unpack", _unpacked)
def unpack(data: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """[..., row bytes] uint8 in the format `name` -> [..., K] numbers in `dtype`, by Triton if it runs, else torch. A
    custom op, so that torch.compile does not trace the bit operations into the graph of every block."""
    if data.is_cuda and fused.triton_runs(data.device):
        from wan_core.ops.kernels import gguf_triton

        if name in gguf_triton.NAMES:
            return gguf_triton.unpack(data, FORMATS[name], dtype)
    return unpack_reference(data, name, dtype)

"""Dequantisation of the GGUF block formats in Triton, in one pass over memory. `gguf_blocks` describes the formats.

Every lane computes one number from its own one or two bytes and the scales of its block, which neighbouring lanes also
load and which therefore come from the cache. All multiplications and additions are exact or rounded once, so the
results equal those of `gguf_blocks`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wan_core.ops.kernels.formats import BlockFormat

NAMES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
WIDTH = 1024  # numbers per program


@triton.jit
def _byte(at, offset):
    return tl.load(at + offset).to(tl.int32)


@triton.jit
def _signed(value):
    return tl.where(value > 127, value - 256, value)


@triton.jit
def _unpack_kernel(data, halves, out, total, CODE: tl.constexpr, NUMBERS: tl.constexpr, BYTES: tl.constexpr,
                   PAIRED: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """`halves` is `data` as float16. CODE is ggml's type number, PAIRED whether it is Q4_K or Q5_K."""
    index = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = index < total
    index = tl.minimum(index, total - 1)
    block = index // NUMBERS
    j = (index - block * NUMBERS).to(tl.int32)
    at = data + block * BYTES
    half = halves + block * (BYTES // 2)
    if NUMBERS == 32:
        scale = tl.load(half).to(tl.float32)
        if CODE == 8:  # Q8_0
            value = scale * _signed(_byte(at, 2 + j)).to(tl.float32)
        elif CODE == 2:  # Q4_0
            q = (_byte(at, 2 + j % 16) >> (j // 16 * 4)) & 15
            value = scale * (q - 8).to(tl.float32)
        elif CODE == 3:  # Q4_1
            q = (_byte(at, 4 + j % 16) >> (j // 16 * 4)) & 15
            value = scale * q.to(tl.float32) + tl.load(half + 1).to(tl.float32)
        elif CODE == 6:  # Q5_0
            high = (_byte(at, 2 + j // 8) >> (j % 8)) & 1
            q = ((_byte(at, 6 + j % 16) >> (j // 16 * 4)) & 15) | (high << 4)
            value = scale * (q - 16).to(tl.float32)
        else:  # Q5_1
            high = (_byte(at, 4 + j // 8) >> (j % 8)) & 1
            q = ((_byte(at, 8 + j % 16) >> (j // 16 * 4)) & 15) | (high << 4)
            value = scale * q.to(tl.float32) + tl.load(half + 1).to(tl.float32)
    elif PAIRED:
        sub = j // 32
        low = sub % 4
        first = _byte(at, 4 + low)
        second = _byte(at, 8 + low)
        third = _byte(at, 12 + low)
        upper = sub >= 4
        scale = tl.where(upper, (third & 15) | ((first >> 6) << 4), first & 63).to(tl.float32)
        minimum = tl.where(upper, (third >> 4) | ((second >> 6) << 4), second & 63).to(tl.float32)
        scale = tl.load(half).to(tl.float32) * scale
        minimum = tl.load(half + 1).to(tl.float32) * minimum
        if CODE == 12:
            q = (_byte(at, 16 + j // 64 * 32 + j % 32) >> (sub % 2 * 4)) & 15
        else:
            high = (_byte(at, 16 + j % 32) >> sub) & 1
            q = ((_byte(at, 48 + j // 64 * 32 + j % 32) >> (sub % 2 * 4)) & 15) | (high << 4)
        value = scale * q.to(tl.float32) - minimum
    elif CODE == 14:  # Q6_K
        part = j % 128
        low = (_byte(at, j // 128 * 64 + part % 64) >> (part // 64 * 4)) & 15
        high = (_byte(at, 128 + j // 128 * 32 + j % 32) >> (part // 32 * 2)) & 3
        scale = tl.load(half + 104).to(tl.float32) * _signed(_byte(at, 192 + j // 16)).to(tl.float32)
        value = scale * ((low | (high << 4)) - 32).to(tl.float32)
    elif CODE == 11:  # Q3_K
        sub = j // 16
        low = (_byte(at, 96 + sub % 8) >> (sub // 8 * 4)) & 15
        high = (_byte(at, 104 + sub % 4) >> (sub // 4 * 2)) & 3
        scale = tl.load(half + 54).to(tl.float32) * ((low | (high << 4)) - 32).to(tl.float32)
        q = (_byte(at, 32 + j // 128 * 32 + j % 32) >> (j % 128 // 32 * 2)) & 3
        raised = (_byte(at, j % 32) >> (j // 32)) & 1
        value = scale * (q - 4 + raised * 4).to(tl.float32)
    else:  # Q2_K
        packed = _byte(at, j // 16)
        scale = tl.load(half + 40).to(tl.float32) * (packed & 15).to(tl.float32)
        minimum = tl.load(half + 41).to(tl.float32) * (packed >> 4).to(tl.float32)
        q = (_byte(at, 16 + j // 128 * 32 + j % 32) >> (j % 128 // 32 * 2)) & 3
        value = scale * q.to(tl.float32) - minimum
    tl.store(out + index, value.to(out.dtype.element_ty), mask=inside)


def unpack(data: Tensor, fmt: BlockFormat, dtype: torch.dtype) -> Tensor:
    """[..., row bytes] uint8 on a GPU -> [..., K] in `dtype`. Every format's blocks have an even number of bytes."""
    data = data.contiguous()
    out = torch.empty((*data.shape[:-1], data.shape[-1] // fmt.bytes * fmt.numbers), dtype=dtype, device=data.device)
    total = out.numel()
    if total:
        with torch.cuda.device(data.device):
            _unpack_kernel[(triton.cdiv(total, WIDTH),)](
                data,
                data.view(torch.float16),
                out,
                total,
                fmt.code,
                fmt.numbers,
                fmt.bytes,
                fmt.name in ("Q4_K", "Q5_K"),
                WIDTH,
            )
    return out

"""NVFP4 and MXFP8 weights: dequantised for each matmul, or multiplied directly on Blackwell. Small groups of numbers
share a scale.

| format | numbers | scale of a group | scale of the tensor |
|---|---|---|---|
| nvfp4 | E2M1 (4 bits), two to a byte, the first in the high half | E4M3, of 16 numbers | float32 |
| mxfp8 | E4M3 | E8M0 (a power of two in one byte), of 32 numbers | |

Group scales are stored in the order in which the matrix units read them: in tiles of 128 rows and 4 columns, with rows
r, r + 32, r + 64 and r + 96 of a tile next to each other, zero-padded to whole tiles.
Source: OCP Microscaling Formats 1.0; cuBLAS, "1D Block Scaling Factors Layout".

Direct matmuls use comfy-kitchen, which also quantises the activations. They have not yet run on such a GPU: the doctor
says "untested on hardware".

Legend: N rows, K numbers of a row, G groups of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.ops.cards import BLACKWELL, capability
from wan_core.ops.custom_ops import operator
from wan_core.ops.kernels.formats import FP8, FP8_MAX

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4_MAX = 6.0
GROUP = {"nvfp4": 16, "mxfp8": 32}


def tiled_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape in which scales [rows, columns] are stored."""
    return -(-rows // 128) * 128, -(-columns // 4) * 4


def tiled(scales: Tensor) -> Tensor:
    """Scales [N, G], one byte each, in the order in which they are stored."""
    rows, columns = tiled_shape(*scales.shape)
    whole = F.pad(scales, (0, columns - scales.shape[1], 0, rows - scales.shape[0]))
    parts = whole.view(rows // 128, 4, 32, columns // 4, 4)  # tile row, r // 32, r % 32, tile column, c
    return parts.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def untiled(stored: Tensor, rows: int, columns: int) -> Tensor:
    """The scales uint8 [rows, columns] that `tiled` stored."""
    whole_rows, whole_columns = tiled_shape(rows, columns)
    parts = stored.view(torch.uint8).reshape(whole_rows // 128, whole_columns // 4, 32, 4, 4)
    return parts.permute(0, 3, 2, 1, 4).reshape(whole_rows, whole_columns)[:rows, :columns]


def power_of_two(code: Tensor) -> Tensor:
    """E8M0 uint8 -> float32. Code 0, 2^-127, stands for groups of zeros only and becomes 0; 255 is no number."""
    value = (code.int() << 23).view(torch.float32)
    return torch.where(code == 255, torch.nan, value)


@functools.cache
def _table(device: torch.device) -> Tensor:
    """Cached on the device: a copy from the host would synchronise and cannot be captured into a CUDA graph."""
    return torch.tensor([*E2M1, *(-value for value in E2M1)], device=device)


def decode_nvfp4(data: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    """data uint8 [N, K/2], scales uint8 (E4M3) as stored, scale float32 one number -> float32 [N, K]."""
    n, k = data.shape[0], data.shape[1] * 2
    codes = torch.stack((data >> 4, data & 15), -1).flatten(1).int()
    groups = untiled(scales, n, k // 16).contiguous().view(FP8).float() * scale.reshape(()).float()
    return (_table(data.device)[codes].unflatten(1, (-1, 16)) * groups[..., None]).flatten(1)


def encode_nvfp4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, K], K a multiple of 16 -> the arguments of `decode_nvfp4`. The largest scale of a group is 448."""
    values = x.float().unflatten(1, (-1, 16))
    amax = values.abs().amax(-1)  # [N, G]
    scale = (amax.amax() / (FP8_MAX * FP4_MAX)).clamp(min=1e-30)
    groups = (amax / FP4_MAX / scale).clamp(max=FP8_MAX).to(FP8)
    step = groups.float() * scale
    scaled = torch.where(step[..., None] > 0, values / step.clamp(min=1e-38)[..., None], 0).flatten(1)
    size = scaled.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    # Ties go to the number with an even code: hence > and >= in turn.
    for i, middle in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += (size > middle) if i % 2 == 0 else (size >= middle)
    code |= (scaled < 0).to(torch.uint8) << 3
    return (code[:, ::2] << 4) | code[:, 1::2], tiled(groups.view(torch.uint8)), scale


def decode_mxfp8(data: Tensor, scales: Tensor) -> Tensor:
    """data E4M3 [N, K], scales uint8 (E8M0) as stored -> float32 [N, K]."""
    groups = power_of_two(untiled(scales, data.shape[0], data.shape[1] // 32))
    return (data.float().unflatten(1, (-1, 32)) * groups[..., None]).flatten(1)


def encode_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, K], K a multiple of 32 -> the arguments of `decode_mxfp8`. A group's scale is the smallest power of two
    with which the group fits E4M3."""
    values = x.float().unflatten(1, (-1, 32))
    amax = values.abs().amax(-1)
    mantissa, exponent = torch.frexp(amax / FP8_MAX)  # amax / 448 = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = (exponent - (mantissa == 0.5).int()).clamp(-126, 127)
    code = torch.where(amax > 0, exponent + 127, 0).to(torch.uint8)
    step = torch.where(amax > 0, power_of_two(code), 1.0)
    data = (values / step[..., None]).clamp(-FP8_MAX, FP8_MAX).to(FP8).flatten(1)
    return data, tiled(code)


def _unpacked(weight: Tensor, scales: Tensor, scale: Tensor | None, fmt: str, dtype: torch.dtype) -> Tensor:
    return weight.new_empty((weight.shape[0], weight.shape[1] * (2 if fmt == "nvfp4" else 1)), dtype=dtype)


@operator("mx_unpack", _unpacked)
def unpack(weight: Tensor, scales: Tensor, scale: Tensor | None, fmt: str, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] dequantised to `dtype`; scales and scale as of `decode_nvfp4`. A custom op, so that
    torch.compile does not trace the bit operations."""
    if fmt == "mxfp8":
        return decode_mxfp8(weight, scales).to(dtype)
    assert scale is not None
    return decode_nvfp4(weight, scales, scale).to(dtype)


def why_not_multiply(device: torch.device) -> str | None:
    """Why `device` cannot multiply NVFP4 and MXFP8 weights directly; None if it can."""
    if (capability(device) or (0, 0)) < BLACKWELL:
        return "needs Blackwell (compute capability 10.0); other GPUs dequantise weights for each matmul"
    if find_spec("comfy_kitchen") is None:
        return "needs comfy-kitchen (pip install comfy-kitchen); without it weights are dequantised for each matmul"
    return None


def multiply(x: Tensor, fmt: str, parts: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    """x [M, K], quantised to the weight's format, times a packed weight [N, K], plus bias -> [M, N] in x's dtype."""
    import comfy_kitchen as kitchen  # pyright: ignore[reportMissingImports]

    rows, weight, scales = len(x), parts["weight"], parts["weight_scale"]
    if fmt == "mxfp8":
        data, x_scales = kitchen.quantize_mxfp8(x, pad_32x=rows % 32 != 0)
        scales = scales.view(torch.float8_e8m0fnu)
        out = kitchen.scaled_mm_mxfp8(data, weight, x_scales, scales, bias=bias, out_dtype=x.dtype)
    else:
        scale = (x.abs().amax().float() / (FP8_MAX * FP4_MAX)).clamp(min=1e-30)
        data, x_scales = kitchen.quantize_nvfp4(x, scale, pad_16x=rows % 16 != 0)
        out = kitchen.scaled_mm_nvfp4(
            data,
            weight,
            tensor_scale_a=scale,
            tensor_scale_b=parts["weight_scale_2"],
            block_scale_a=x_scales,
            block_scale_b=scales.view(FP8),
            bias=bias,
            out_dtype=x.dtype,
        )
    return out[:rows]

"""NVFP4 and MXFP8 weights: dequantised for each matmul, or multiplied directly on Blackwell.

Direct matmuls use comfy-kitchen, which also quantises the activations. They have not yet run on such a GPU: the doctor
says "untested on hardware".
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from wan_core.ops.cards import BLACKWELL, capability
from wan_core.ops.custom_ops import operator
from wan_core.ops.kernels import microscaling
from wan_core.ops.kernels.formats import FP8, FP8_MAX


def _unpacked(weight: Tensor, scales: Tensor, scale: Tensor | None, fmt: str, dtype: torch.dtype) -> Tensor:
    return weight.new_empty((weight.shape[0], weight.shape[1] * (2 if fmt == "nvfp4" else 1)), dtype=dtype)


@operator("mx_unpack", _unpacked)
def unpack(weight: Tensor, scales: Tensor, scale: Tensor | None, fmt: str, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] dequantised to `dtype`; scales and scale as in `microscaling`. A custom op, so that
    torch.compile does not trace the bit operations."""
    if fmt == "mxfp8":
        return microscaling.decode_mxfp8(weight, scales).to(dtype)
    assert scale is not None
    return microscaling.decode_nvfp4(weight, scales, scale).to(dtype)


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
        scale = (x.abs().amax().float() / (FP8_MAX * microscaling.FP4_MAX)).clamp(min=1e-30)
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

"""NVFP4 and MXFP8 weights on the device: widened anywhere, multiplied as they are on Blackwell.

The products are comfy-kitchen's, which also quantises the activations and knows the calls of torch behind them. No
machine with such a card has run this yet: the doctor says "untested on hardware".
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from wan_core.ops.custom_ops import operator, shapes_of
from wan_core.ops.kernels import microscaling
from wan_core.ops.kernels.formats import FP8, FP8_MAX


def unpack(weight: Tensor, scales: Tensor, scale: Tensor | None, fmt: str, dtype: torch.dtype) -> Tensor:
    """The numbers [N, K] of a weight; scales and scale as in `microscaling`."""
    return torch.ops.wancore.mx_unpack(weight, scales, scale, fmt, dtype)


@operator("mx_unpack")
def _unpack(weight: Tensor, scales: Tensor, scale: Tensor | None, fmt: str, dtype: torch.dtype) -> Tensor:
    """A compiler sees one call."""
    if fmt == "mxfp8":
        return microscaling.decode_mxfp8(weight, scales).to(dtype)
    assert scale is not None
    return microscaling.decode_nvfp4(weight, scales, scale).to(dtype)


@shapes_of(_unpack)
def _(weight: Tensor, scales: Tensor, scale: Tensor | None, fmt: str, dtype: torch.dtype) -> Tensor:
    return weight.new_empty((weight.shape[0], weight.shape[1] * (2 if fmt == "nvfp4" else 1)), dtype=dtype)


def why_not_multiply(device: torch.device) -> str | None:
    """Why NVFP4 and MXFP8 are not multiplied as they are on `device`; None where they are."""
    if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] < 10:
        return "needs Blackwell (compute capability 10.0): elsewhere weights are widened for each product"
    if find_spec("comfy_kitchen") is None:
        return "needs comfy-kitchen (pip install comfy-kitchen): without it weights are widened for each product"
    return None


def multiply(x: Tensor, fmt: str, parts: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    """x [M, K] times a packed weight, x quantised in the same format -> [M, N] in x's dtype."""
    import comfy_kitchen as kitchen  # pyright: ignore[reportMissingImports]

    rows, weight, scales = len(x), parts["weight"], parts["weight_scale"]
    if fmt == "mxfp8":
        data, own = kitchen.quantize_mxfp8(x, pad_32x=rows % 32 != 0)
        scales = scales.view(torch.float8_e8m0fnu)
        out = kitchen.scaled_mm_mxfp8(data, weight, own, scales, bias=bias, out_dtype=x.dtype)
    else:
        scale = (x.abs().amax().float() / (FP8_MAX * microscaling.FP4_MAX)).clamp(min=1e-30)
        data, own = kitchen.quantize_nvfp4(x, scale, pad_16x=rows % 16 != 0)
        out = kitchen.scaled_mm_nvfp4(
            data,
            weight,
            tensor_scale_a=scale,
            tensor_scale_b=parts["weight_scale_2"],
            block_scale_a=own,
            block_scale_b=scales.view(FP8),
            bias=bias,
            out_dtype=x.dtype,
        )
    return out[:rows]

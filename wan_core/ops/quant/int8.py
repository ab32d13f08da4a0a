"""INT8 products, of weights as ComfyUI's files store them (INT8 and 4 bits) and of weights that are encoded here.

Activations are rounded to INT8 with a scale for every row, after the rotation that the weight has. There are three
ways, equal but for rounding: comfy-kitchen's kernels on a GPU, torch's INT8 matmul on a GPU without comfy-kitchen, and
plain torch on a CPU.

Legend: M rows of activations, K inputs, N outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.ops.cards import TURING, capability, card_of
from wan_core.ops.custom_ops import operator
from wan_core.ops.kernels.integer_weights import (
    IntegerFormat,
    as_int8,
    decode,
    encode_int8,
    integer_format,
    linear_reference,
    quantize_rows,
    rotate,
    rotation_of,
)
from wan_core.ops.quant.changed import change_int8
from wan_core.ops.quant.linear import QuantLinear

CHUNK = 4096  # rows of activations whose int32 products exist at one time, where torch multiplies


def why_not_multiply(device: torch.device) -> str | None:
    """Why `device` cannot multiply INT8, whichever way; None if it can."""
    if device.type == "cpu":
        return None
    if (capability(device) or (0, 0)) < TURING:
        return "needs an NVIDIA GPU of compute capability 7.5 (Turing) or newer; others dequantise for each matmul"
    return None


def why_not_kitchen(device: torch.device) -> str | None:
    """Why comfy-kitchen's INT8 kernels do not run on `device`; None if they do."""
    if device.type != "cuda":
        return "runs on NVIDIA GPUs"
    return why_not_multiply(device) or _not_installed()


@functools.cache
def _not_installed() -> str | None:
    if find_spec("comfy_kitchen") is None:
        return "needs comfy-kitchen (pip install comfy-kitchen); without it torch multiplies, which is slower"
    import comfy_kitchen as kitchen  # pyright: ignore[reportMissingImports]

    if kitchen.registry.is_available("cuda"):
        return None
    return "comfy-kitchen has no kernels for this torch (it needs CUDA 13); without them torch multiplies"


def as_fp8(device: torch.device) -> tuple[bool, str]:
    """Whether weights stored in INT8 run better on `device` encoded as FP8, and why that or as stored."""
    if (version := capability(device)) is None:
        return False, "INT8 as stored, in plain torch"
    if (reason := why_not_multiply(device)) is not None:
        return False, f"INT8 products: {reason}"
    reason = why_not_kitchen(device)
    card = card_of(version)
    way = next(way for way in card.int8 if way != "kitchen" or reason is None)
    if way == "fp8" and "kitchen" not in card.int8:
        return True, f"stored in INT8; FP8 products are faster on {card.name}"
    if way == "fp8":
        return True, f"stored in INT8, encoded as FP8: INT8 {reason}"
    return False, f"INT8 as stored{', by comfy-kitchen' if reason is None else f': {reason}'}"


def _order(parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The parts of a packed weight as operators take them."""
    scale = parts["weight_s_rel"] if "weight_s_rel" in parts else parts["weight_scale"]
    return parts["weight"], scale, parts.get("weight_s_channel"), parts.get("weight_codebook")


def _named(weight: Tensor, scale: Tensor, channel: Tensor | None, codebook: Tensor | None) -> dict[str, Tensor]:
    """The opposite of `_order`."""
    optional = {"weight_s_channel": channel, "weight_codebook": codebook}
    present = {name: part for name, part in optional.items() if part is not None}
    return {"weight": weight, "weight_scale": scale, "weight_s_rel": scale, **present}


def _format(text: str) -> IntegerFormat:
    packing = integer_format(text)
    assert packing is not None
    return packing


def multiply(x: Tensor, fmt: str, parts: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    """x [M, K] times a packed weight [N, K], plus bias -> [M, N] in x's dtype."""
    return _linear(x, fmt, bias, *_order(parts))


def unpack(fmt: str, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The numbers [N, K] of a packed weight."""
    return _unpack(fmt, dtype, *_order(parts))


def _unpacked(fmt: str, dtype: torch.dtype, weight: Tensor, *_: Any) -> Tensor:
    return weight.new_empty((weight.shape[0], weight.shape[1] * _format(fmt).numbers_in_byte), dtype=dtype)


@operator("integer_unpack", _unpacked)
def _unpack(
    fmt: str, dtype: torch.dtype, weight: Tensor, scale: Tensor, channel: Tensor | None, codebook: Tensor | None
) -> Tensor:
    return decode(_format(fmt), _named(weight, scale, channel, codebook)).to(dtype)


@operator("integer_linear", lambda x, fmt, bias, weight, *_: x.new_empty((x.shape[0], weight.shape[0])))
def _linear(
    x: Tensor,
    fmt: str,
    bias: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    channel: Tensor | None,
    codebook: Tensor | None,
) -> Tensor:
    packing, parts = _format(fmt), _named(weight, scale, channel, codebook)
    if why_not_kitchen(x.device) is None:
        with torch.cuda.device(x.device):  # where it launches
            return _kitchen(x, packing, parts, bias)
    if why_not_multiply(x.device) is not None or (x.is_cuda and (len(weight) % 8 or x.shape[1] % 8)):
        return F.linear(x, decode(packing, parts).to(x.dtype), bias)
    data, scales = as_int8(packing, parts)
    product = torch_linear if x.is_cuda else linear_reference
    return product(x, data, scales, bias, packing.rotation)


def _kitchen(x: Tensor, fmt: IntegerFormat, parts: Mapping[str, Tensor], bias: Tensor | None) -> Tensor:
    import comfy_kitchen as kitchen  # pyright: ignore[reportMissingImports]

    weight, scale = parts["weight"], parts["weight_scale"]
    x = x.contiguous()
    if fmt.name == "int8_tensorwise":
        rotated, size = fmt.rotation > 0, fmt.rotation or 256
        return kitchen.int8_linear(x, weight, scale, bias, x.dtype, convrot=rotated, convrot_groupsize=size)
    if fmt.name == "convrot_w4a4":
        inputs = "int4" if fmt.int4 else "int8"
        return kitchen.convrot_w4a4_linear(x, weight, scale, bias, fmt.rotation, linear_dtype=inputs)
    codebook = parts.get("weight_codebook")
    if codebook is None:  # on an H200 its kernel for 4-bit weights missed the reference there
        weight, scale = as_int8(fmt, parts)
        return kitchen.int8_linear(x, weight, scale, bias, x.dtype, convrot=True, convrot_groupsize=fmt.rotation)
    sizes = {"group_size": fmt.group, "convrot_groupsize": fmt.rotation, "out_dtype": x.dtype}
    return kitchen.w4a8_int8_linear(x, weight, scale, parts["weight_s_channel"], codebook=codebook, bias=bias, **sizes)


def torch_linear(x: Tensor, data: Tensor, scale: Tensor, bias: Tensor | None, rotation: int) -> Tensor:
    """`linear_reference` on a GPU, some rows at a time, because int32 products take twice the memory of the result.
    torch wants more than 16 rows there."""
    out = x.new_empty((len(x), len(data)))
    for begin in range(0, len(x), CHUNK):
        part = x[begin : begin + CHUNK]
        rows, row_scale = quantize_rows(rotate(part, rotation))
        rows = F.pad(rows, (0, 0, 0, max(0, 32 - len(rows))))
        product = torch.ops.aten._int_mm(rows, data.t())[: len(part)].float().mul_(row_scale).mul_(scale)
        out[begin : begin + CHUNK] = product if bias is None else product.add_(bias)
    return out


def row_format(k: int) -> str:
    """`Packed.fmt` of a matrix with rows of `k` numbers that is encoded here."""
    return IntegerFormat("int8_tensorwise", rotation_of(k)).text


class Int8Linear(QuantLinear):
    """INT8, a scale for every output channel and row of activations, both rotated: `int8_tensorwise` with ConvRot."""

    storage = torch.int8

    def __init__(self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype = torch.bfloat16):
        super().__init__(in_features, out_features, bias, dtype)
        self.packing = row_format(in_features)  # of its weight, as `Packed.fmt`

    @property
    def description(self) -> Mapping[str, object]:
        rotation = rotation_of(self.in_features)
        rotated = {"convrot": True, "convrot_groupsize": rotation} if rotation else {}
        return {"format": "int8_tensorwise", **rotated}

    @classmethod
    def scale_shape(cls, n: int, k: int) -> tuple[int, ...]:
        return (n, 1)

    @classmethod
    def why_not_shape(cls, n: int, k: int) -> str | None:
        return None if n % 8 == 0 and k % 8 == 0 else "INT8 matmuls need multiples of 8 inputs and outputs"

    @classmethod
    def encode(cls, weight: Tensor) -> dict[str, Tensor]:
        return encode_int8(weight, rotation_of(weight.shape[1]))

    @classmethod
    def change(cls, stored: Mapping[str, Tensor], total: Tensor) -> dict[str, Tensor]:
        return change_int8(stored["weight"], stored["weight_scale"], rotate(total, rotation_of(total.shape[1])))

    def decode(self, weight: Tensor, scale: Tensor) -> Tensor:
        return rotate(super().decode(weight, scale), rotation_of(self.in_features))

    @classmethod
    def adopt(cls, stored: Any) -> dict[str, Tensor] | None:
        """Packed INT8 of the same rotation is taken as it is."""
        if stored.fmt != row_format(stored.shape[1]):
            return None
        scale = stored.parts["weight_scale"].float().reshape(-1, 1)
        return {"weight": stored.parts["weight"], "weight_scale": scale.expand(stored.shape[0], 1).contiguous()}

    def quantize(self, x: Tensor) -> Tensor:
        return x  # the kernels that multiply rotate and round as well

    def product(self, x: Tensor) -> Tensor:
        parts = {"weight": self.weight, "weight_scale": self.weight_scale}
        return multiply(x.flatten(0, -2), self.packing, parts, self.bias).unflatten(0, x.shape[:-1])

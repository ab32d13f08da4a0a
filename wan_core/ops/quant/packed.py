"""Weights that keep the file's packed format in memory: GGUF blocks, NVFP4, MXFP8, INT8, 4 bits, and FP8.

They are dequantised for each matmul (to bf16 on a GPU), which takes one pass over the weight: little time compared with
the activations of a video. A linear's parameters are the tensors of the file, so code that moves, swaps or shares
models does not depend on formats.

Legend: M rows of activations, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.ops.kernels import gguf_blocks
from wan_core.ops.kernels.formats import FP8, FP8_MAX, spread_scale
from wan_core.ops.kernels.integer_weights import NAMES as INTEGERS
from wan_core.ops.kernels.integer_weights import integer_format
from wan_core.ops.quant import int8, mx
from wan_core.ops.quant.linear import LowRank, QuantLinear

MICROSCALED = ("nvfp4", "mxfp8")
FORMATS = (*gguf_blocks.FORMATS, *MICROSCALED, *INTEGERS, "fp8")


PRECISION = "packed"  # its name in reports; users get it with precision "checkpoint"


class Packed(NamedTuple):
    """A packed matrix.

    fmt: one of `FORMATS`; words about rotation follow one of `INTEGERS` (`integer_format`). shape: [N, K], or the shape
    of another packed tensor. parts: parameter name -> tensor, `weight` first; the other names and the shapes depend on
    the format.
    """

    fmt: str
    shape: tuple[int, ...]
    parts: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def to(self, device: torch.device) -> Packed:
        return self._replace(parts={name: part.to(device) for name, part in self.parts.items()})

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers of shape `shape`, on the device of the parts."""
        return unpack(self.fmt, self.parts, dtype).reshape(self.shape)


class Changed(NamedTuple):
    """A packed matrix to which LoRAs were added. total: its numbers with them, float32 of its shape."""

    stored: Packed
    total: Tensor


def stored_parts(fmt: str, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts of a matrix as its kernels take them, of those of a file, where dtypes of bytes and shapes of scales
    differ."""
    parts = dict(stored)
    if fmt in MICROSCALED:
        parts["weight_scale"] = parts["weight_scale"].view(torch.uint8)
        if "weight_scale_2" in parts:
            parts["weight_scale_2"] = parts["weight_scale_2"].reshape(()).float()
    elif fmt == "fp8":
        parts["weight_scale"] = parts["weight_scale"].float()
    elif integer_format(fmt) is not None:
        for name, value in stored.items():
            if name == "weight":
                parts[name] = value.view(torch.int8)
            elif name == "weight_s_rel":
                parts[name] = value.view(FP8) if value.dtype == torch.uint8 else value
            else:
                parts[name] = value.float().reshape(-1)
    return parts


def as_e4m3(stored: Tensor | Packed) -> Tensor | Packed:
    """A matrix [N, K] in FP8 without a scale, or in E5M2, as E4M3 with one; others as they are. Nothing is rounded: the
    numbers are divided by a power of two that brings the largest up to 448, and the scale is multiplied by it. So small
    numbers become normal ones, and a LoRA that is added to them is not lost. Only E5M2 below 2^-14 of the largest may
    lose digits."""
    weight, scale = stored, torch.ones(1)
    if isinstance(stored, Packed):
        weight, scale = stored.parts["weight"], stored.parts.get("weight_scale", scale)
    assert isinstance(weight, Tensor)
    plain = isinstance(stored, Tensor) and weight.dtype == FP8
    if not plain and weight.dtype != torch.float8_e5m2:
        return stored
    values = weight.float()
    factor = torch.exp2((values.abs().amax().clamp(min=2.0**-30) / FP8_MAX).log2().ceil())
    parts = {"weight": (values / factor).to(FP8), "weight_scale": scale.to(factor) * factor}
    return Packed("fp8", tuple(weight.shape), parts)


def unpack(fmt: str, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The numbers of a packed matrix, computed in float32 and rounded once."""
    weight = parts["weight"]
    if fmt in gguf_blocks.FORMATS:
        return gguf_blocks.unpack(weight, fmt, dtype)
    if fmt in MICROSCALED:
        return mx.unpack(weight, parts["weight_scale"], parts.get("weight_scale_2"), fmt, dtype)
    if fmt == "fp8":
        return weight.to(torch.float32, copy=True).mul_(spread_scale(parts["weight_scale"], weight.shape)).to(dtype)
    return int8.unpack(fmt, parts, dtype)


def why_not_multiply(fmt: str, device: torch.device) -> str | None:
    """Why `device` cannot multiply packed weights directly; None if it can."""
    if fmt in MICROSCALED:
        return mx.why_not_multiply(device)
    integers = integer_format(fmt)
    if integers is None:
        return "no device can"
    return "its file wants products of high precision" if integers.wide else int8.why_not_multiply(device)


def holds_tables(fmt: str | None) -> bool:
    """Whether an embedding table of this format stays packed: its rows can be dequantised one by one."""
    integers = integer_format(fmt or "")
    return fmt in gguf_blocks.FORMATS or (integers is not None and integers.name == "int8_tensorwise")


class PackedLinear(QuantLinear):
    """A linear whose weight stays packed. Its parameters are on the meta device until values are assigned.

    NVFP4, MXFP8, INT8 and 4 bits are multiplied directly if the device can; see `why_not_multiply` of `mx` and `int8`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        packed: Packed | None = None,
    ) -> None:
        """packed: format and shapes of the parameters; None for a linear that is only used for queries."""
        LowRank.__init__(self)
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self.packing = _declare(self, packed)
        self.multiplies = False  # multiply the packed weight directly, without dequantising it
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device="meta"), False) if bias else None

    @classmethod
    def scale_shape(cls, n: int, k: int) -> tuple[int, ...]:
        return ()

    @classmethod
    def why_not_shape(cls, n: int, k: int) -> str | None:
        return None

    def quantize(self, x: Tensor) -> Tensor:
        return x  # linears that share an input may have different formats: each quantises it itself

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] in `dtype`."""
        return unpack(self.packing, _parts(self), dtype)

    def product(self, x: Tensor) -> Tensor:
        if self.multiplies:
            product = mx.multiply if self.packing in MICROSCALED else int8.multiply
            out = product(x.flatten(0, -2), self.packing, _parts(self), self.bias)
            return out.unflatten(0, x.shape[:-1])
        return F.linear(x, self.dequantize(x.dtype), self.bias)


class PackedEmbedding(nn.Module):
    """An embedding table that stays packed: only the rows that are looked up are dequantised."""

    weight: Tensor  # uint8 [rows, row bytes], or int8 [rows, C]

    def __init__(self, dtype: torch.dtype, packed: Packed) -> None:
        """dtype: of the output."""
        super().__init__()
        self.dtype = dtype
        self.packing = _declare(self, packed)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [...] -> [..., C]."""
        if self.packing in gguf_blocks.FORMATS:
            return gguf_blocks.unpack(self.weight[ids], self.packing, self.dtype)
        rows, parts = ids.flatten(), _parts(self)
        row_parts = {name: part[rows] if len(part) > 1 else part for name, part in parts.items()}
        return int8.unpack(self.packing, row_parts, self.dtype).unflatten(0, ids.shape)


def _declare(module: nn.Module, packed: Packed | None) -> str:
    """Register the parameters of `packed` in `module`, without values. Returns the format."""
    for name, part in {} if packed is None else packed.parts.items():
        empty = torch.empty(part.shape, dtype=part.dtype, device="meta")
        module.register_parameter(name, nn.Parameter(empty, requires_grad=False))
    return "" if packed is None else packed.fmt


def _parts(module: nn.Module) -> dict[str, Tensor]:
    names = ("weight", "weight_scale", "weight_scale_2", "weight_s_rel", "weight_s_channel", "weight_codebook")
    return {name: module._parameters[name] for name in names if name in module._parameters}  # type: ignore[misc]


def put_packed(
    model: nn.Module, weights: Iterable[tuple[str, Packed]], dtype: torch.dtype, device: torch.device
) -> None:
    """Replace the named modules by packed ones on meta. dtype: of their outputs. device: where they will compute."""
    for name, packed in weights:
        parent, _, last = name.rpartition(".")
        old = model.get_submodule(name)
        if isinstance(old, nn.Embedding):
            new: nn.Module = PackedEmbedding(dtype, packed)
        else:
            assert isinstance(old, nn.Linear)
            new = PackedLinear(old.in_features, old.out_features, old.bias is not None, dtype, packed)
            new.multiplies = why_not_multiply(packed.fmt, device) is None
        model.get_submodule(parent)._modules[last] = new

"""FP8 linears on torch's own scaled matrix product, E4M3 with current scaling (a scale fits the very numbers that it
scales). On a CPU they compute the same arithmetic in float32: exact enough to judge the error of FP8 without a GPU.

Legend: M rows of activations, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.ops.cards import capability, has_fp8
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.formats import BLOCK, FP8, FP8_MAX, Format, Quantized, quantize_reference, spread_scale
from wan_core.ops.quant.changed import change_fp8
from wan_core.ops.quant.linear import QuantLinear


def why_not_multiply(device: torch.device) -> str | None:
    """Why torch cannot multiply FP8 on `device`; None if it can. A CPU can, by way of float32."""
    if device.type == "cpu":
        return None
    if capability(device) is None:
        return "needs an NVIDIA GPU"
    if not has_fp8(device):
        return (
            f"{torch.cuda.get_device_name(device)} has no FP8 units (they come with compute capability 8.9, Ada): use "
            "fp8-weights, which halves the memory and computes in bf16"
        )
    return None


def _is_e4m3(stored: Any) -> bool:
    """Whether a `Packed` is FP8 as these linears multiply it."""
    return stored.fmt == "fp8" and stored.parts["weight"].dtype == FP8


class Fp8Linear(QuantLinear):
    """What the three granularities share."""

    activations: ClassVar[Format]

    @classmethod
    def encode(cls, weight: Tensor) -> dict[str, Tensor]:
        data, scale = quantize_reference(weight, cls.activations)
        return {"weight": data, "weight_scale": scale}

    @classmethod
    def change(cls, stored: Mapping[str, Tensor], total: Tensor) -> dict[str, Tensor]:
        data, scale = stored["weight"], stored["weight_scale"]
        if data.dtype != FP8 or scale.numel() not in (1, len(data)):
            return cls.encode(total)
        return change_fp8(data, scale, total)

    def quantize(self, x: Tensor) -> Quantized:
        return fused.quantize(x, self.activations)

    def product(self, x: Tensor | Quantized) -> Tensor:
        if isinstance(x, Tensor):
            x = self.quantize(x)
        data = x.data.flatten(0, -2)  # [M, K]
        if data.is_cuda:
            out = self.multiply(data, x.scale)
        else:
            weight = self.weight.float() * spread_scale(self.weight_scale, self.weight.shape)
            bias = None if self.bias is None else self.bias.float()
            out = F.linear(x.dequantize().flatten(0, -2), weight, bias).to(self.dtype)
        return out.unflatten(0, x.data.shape[:-1])

    def multiply(self, data: Tensor, scale: Tensor) -> Tensor:
        """[M, K] FP8 -> [M, N], with `scale` as in `Quantized`."""
        raise NotImplementedError


class Fp8RowLinear(Fp8Linear):
    """A scale for every row of activations and every output channel. The default: its input comes quantised out of a
    fused kernel."""

    activations = "row"
    fmt = "row"
    takes_fp8 = True

    @classmethod
    def scale_shape(cls, n: int, k: int) -> tuple[int, ...]:
        return (n, 1)

    @classmethod
    def adopt(cls, stored: Any) -> dict[str, Tensor] | None:
        if not _is_e4m3(stored):
            return None
        weight, scale = stored.parts["weight"], stored.parts["weight_scale"]
        rows = len(weight)
        if scale.numel() == 1:  # one number serves every channel
            return {"weight": weight, "weight_scale": scale.reshape(1, 1).repeat(rows, 1)}
        if scale.numel() != rows or len(scale) != rows:
            return None
        return {"weight": weight, "weight_scale": scale.reshape(rows, 1)}

    def multiply(self, data: Tensor, scale: Tensor) -> Tensor:
        rows = scale.flatten(0, -2) if scale.ndim > 1 else scale.expand(len(data), 1)  # one scale serves every row
        return torch.ops.aten._scaled_mm(
            data, self.weight.t(), rows.contiguous(), self.weight_scale.t(), self.bias, None, self.dtype, True
        )


class Fp8TensorLinear(Fp8Linear):
    """One scale for all activations and one for the weight: the fastest product, after a pass for the maximum."""

    activations = "tensor"
    takes_fp8 = True

    @property
    def description(self) -> Mapping[str, object]:
        return {"format": "float8_e4m3fn"}

    @classmethod
    def scale_shape(cls, n: int, k: int) -> tuple[int, ...]:
        return (1,)

    @classmethod
    def adopt(cls, stored: Any) -> dict[str, Tensor] | None:
        if not _is_e4m3(stored) or stored.parts["weight_scale"].numel() != 1:
            return None
        return {"weight": stored.parts["weight"], "weight_scale": stored.parts["weight_scale"].reshape(1)}

    def multiply(self, data: Tensor, scale: Tensor) -> Tensor:
        return torch.ops.aten._scaled_mm(
            data, self.weight.t(), scale.reshape(()), self.weight_scale.reshape(()), self.bias, None, self.dtype, True
        )


class Fp8BlockLinear(Fp8Linear):
    """A scale for 128 inputs of a row and for 128 x 128 weights. On a GPU it is Transformer Engine's (`te-block`)."""

    activations = "block"
    fmt = "block"

    @classmethod
    def scale_shape(cls, n: int, k: int) -> tuple[int, ...]:
        return (-(-n // BLOCK), -(-k // BLOCK))

    @classmethod
    def encode(cls, weight: Tensor) -> dict[str, Tensor]:
        """Blocks at the edges may be smaller."""
        n, k = weight.shape
        whole = F.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
        blocks = whole.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [N/128, 128, K/128, 128]
        scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / FP8_MAX
        data = (blocks / scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        return {"weight": data.flatten(2, 3).flatten(0, 1)[:n, :k].contiguous(), "weight_scale": scale}

    @classmethod
    def adopt(cls, stored: Any) -> dict[str, Tensor] | None:
        fits = _is_e4m3(stored) and stored.parts["weight_scale"].shape == cls.scale_shape(*stored.shape)
        return dict(stored.parts) if fits else None

    @classmethod
    def why_not_shape(cls, n: int, k: int) -> str | None:
        return f"blocks need rows of a multiple of {BLOCK} inputs" if k % BLOCK else super().why_not_shape(n, k)


def padded(t: Tensor, multiple: int, dim: int) -> Tensor:
    """t [rows, columns] with zeros behind it up to a multiple of `multiple` in `dim` 0 or 1; t itself, not a copy,
    where nothing is missing."""
    lacking = -t.shape[dim] % multiple
    if not lacking:
        return t
    raw = t.view(torch.uint8) if t.dtype == FP8 else t  # torch has no padding of FP8
    return F.pad(raw, (0, lacking) if dim == 1 else (0, 0, 0, lacking)).view(t.dtype)


class Fp8WeightLinear(Fp8RowLinear):
    """FP8 in memory, stored as by `Fp8RowLinear`; bf16 in the product: for memory, and for cards without FP8 units."""

    fmt = None
    takes_fp8 = False

    def quantize(self, x: Tensor) -> Tensor:
        return x

    def product(self, x: Tensor) -> Tensor:
        # Widened for this product only: a pass over the weight, which is small beside the activations. It is multiplied
        # in the scale's float32 and rounded once, in place.
        weight = self.weight.to(x.dtype).mul_(self.weight_scale)
        return F.linear(x, weight, self.bias)

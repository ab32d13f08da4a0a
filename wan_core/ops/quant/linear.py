"""The linears of a transformer: a plain one, and the base of the quantised ones. LoRAs can be attached to both.

A quantised linear has the parameter names of `nn.Linear`, an FP8 weight and its scales.

An attached LoRA leaves the product as it was and adds one of low rank to it:

    out = linear(x) + (x @ down^T * strength) @ up^T

The strengths are a tensor [R] that the products read: changing its numbers compiles nothing again.
Linears with the same ranks share it.

Legend: M rows of activations, K inputs, N outputs, R the ranks of all attached LoRAs together.

Weights are plain tensors for every library that multiplies them, so that saving, moving and sharing do not depend on
FP8: `weight` float8_e4m3fn [N, K] and `weight_scale` float32, [1] (one per tensor), [N, 1] (one per output channel) or
[N/128, K/128] (one per block).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.ops.kernels.formats import FP8, Format, Quantized, spread_scale


class LowRank(nn.Module):
    """Base of linears with LoRAs: the result of `product`, plus that of the attached LoRA.

    `lora_down` [R, K] and `lora_up` [N, R] are non-persistent buffers. They stay on the device that computes, also if
    the weights stream, and so does `lora_strength`, float32 [R].
    `wan_core.ops.quant.linear` attaches and detaches LoRAs.
    """

    lora_down: Tensor | None
    lora_up: Tensor | None
    lora_strength: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("lora_down", None, persistent=False)
        self.register_buffer("lora_up", None, persistent=False)
        self.lora_strength = None

    def product(self, x: Any) -> Tensor:
        """x [..., K], in a form that the linear takes -> [..., N], in memory of its own."""
        raise NotImplementedError

    def forward(self, x: Any) -> Tensor:
        """x [..., K], in a form that the linear takes -> [..., N]."""
        out = self.product(x)
        if self.lora_down is None or self.lora_up is None or self.lora_strength is None:
            return out
        rows = out.flatten(0, -2)
        inner = low_rank_input(x, self.lora_down) * self.lora_strength
        rows = rows.addmm_(inner.to(rows.dtype).flatten(0, -2), self.lora_up.t())
        return rows.unflatten(0, out.shape[:-1])


def low_rank_input(x: Tensor | Quantized, down: Tensor) -> Tensor:
    """x [..., K] @ down^T [K, R] -> [..., R]. FP8 numbers are exact in `down`'s dtype; scales of rows are applied after
    the matmul, to fewer numbers."""
    if isinstance(x, Tensor):
        return F.linear(x.to(down.dtype), down)
    scale, data = x.scale, x.data.to(down.dtype)
    if scale.ndim > 1 and scale.shape[-1] > 1:  # for blocks of a row
        data = (data.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None].to(down.dtype)).flatten(-2)
        return F.linear(data, down)
    return F.linear(data, down) * scale


class Linear(nn.Linear, LowRank):
    def forward(self, input: Tensor) -> Tensor:
        return LowRank.forward(self, input)

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class QuantLinear(LowRank):
    """Base of the quantised linears. Built without values; `encode` makes them from a weight of higher precision."""

    storage: ClassVar[torch.dtype] = FP8  # dtype of `weight`
    fmt: ClassVar[Format | None] = None  # the input format that a fused kernel may write; None: only `quantize` can
    takes_fp8: ClassVar[bool] = False  # also accepts a `Quantized` with one scale, the output of FP8 attention

    def __init__(self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype = torch.bfloat16):
        """dtype: of the bias and the output. Parameters are on the meta device until values are assigned."""
        super().__init__()
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        scales = self.scale_shape(out_features, in_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=self.storage, device="meta"), False)
        self.weight_scale = nn.Parameter(torch.empty(scales, dtype=torch.float32, device="meta"), False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device="meta"), False) if bias else None

    @classmethod
    def scale_shape(cls, n: int, k: int) -> tuple[int, ...]:
        """The shape of `weight_scale` for a weight [n, k]."""
        raise NotImplementedError

    @classmethod
    def why_not_shape(cls, n: int, k: int) -> str | None:
        """Why a weight [n, k] cannot have this format; None if it can. Matrix units read FP8 in groups of 16."""
        return None if n % 16 == 0 and k % 16 == 0 else "FP8 matmuls need multiples of 16 inputs and outputs"

    @classmethod
    def encode(cls, weight: Tensor) -> dict[str, Tensor]:
        """`weight` and `weight_scale` of a weight [N, K] of higher precision, on its device."""
        raise NotImplementedError

    @classmethod
    def adopt(cls, stored: Any) -> dict[str, Tensor] | None:
        """`weight` and `weight_scale` from a `Packed` that a file stores, unchanged; None if it is of another format.
        The scale of FP8 has one number, or the shape [N], [N, 1] or [N/128, K/128]."""
        return None

    @classmethod
    def change(cls, stored: Mapping[str, Tensor], total: Tensor) -> dict[str, Tensor]:
        """`encode` of `total`, float32 [N, K], the weight that `adopt` gave as `stored` with LoRAs added."""
        return cls.encode(total)

    @property
    def description(self) -> Mapping[str, object] | None:
        """What ComfyUI's files say of such a matrix (`comfy_quant`); None if they have no such format."""
        return None

    def decode(self, weight: Tensor, scale: Tensor) -> Tensor:
        """The numbers in float32 [N, K] that `encode` made these of, but for rounding."""
        return weight.float() * spread_scale(scale, weight.shape)

    def load(self, values: dict[str, Tensor]) -> None:
        """Set `weight` and `weight_scale` (from `encode`) and `bias` without a copy, on their device."""
        for name, value in values.items():
            setattr(self, name, nn.Parameter(value, requires_grad=False))

    def quantize(self, x: Tensor) -> Any:
        """x [..., K] in the form that `forward` multiplies. Linears of the same kind can share one result."""
        raise NotImplementedError

    def product(self, x: Any) -> Tensor:
        """x [..., K], a tensor or the result of `quantize` (or of a fused kernel with `fmt`) -> [..., N]."""
        raise NotImplementedError


@torch.no_grad()
def attach(linear: LowRank, pairs: Sequence[tuple[Tensor, Tensor]], strength: Tensor, dtype: torch.dtype) -> None:
    """Add LoRAs to `linear`, in place of any that were attached before.

    pairs: (up [N, r], down [r, K]) each; strength: float32 [R], R the sum of r, on the device that computes, and kept:
    writing into it changes the strengths. dtype: of the two products, that of the activations.
    """
    detach(linear)
    home = strength.device
    linear.lora_up = torch.cat([up for up, _ in pairs], 1).to(home, dtype)
    linear.lora_down = torch.cat([down for _, down in pairs]).to(home, dtype)
    linear.lora_strength = strength


@torch.no_grad()
def move_attached(linear: LowRank, device: torch.device) -> None:
    """Move what `attach` added. The strengths stay where they are."""
    assert linear.lora_up is not None and linear.lora_down is not None
    linear.lora_up, linear.lora_down = linear.lora_up.to(device), linear.lora_down.to(device)


def is_attached(name: str) -> bool:
    """Whether a tensor of this name is an attached LoRA's: on the device also where weights stream."""
    return name.endswith((".lora_up", ".lora_down"))


def detach(linear: LowRank) -> None:
    """The linear as it was before `attach`; nothing where none is attached."""
    linear.lora_up = linear.lora_down = None
    linear.lora_strength = None

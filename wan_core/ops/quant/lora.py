"""LoRAs attached to linears: the product goes on as it was, and a product of low rank is added to it.

Legend: M rows of activations, K inputs, N outputs, R the ranks of all attached LoRAs together.

    out = linear(x) + (x @ down^T * strength) @ up^T

Any linear takes one, plain or quantised: it is given a class that inherits from its own, in its place, and keeps its
parameters, their names, its input format and its identity. What is added are two buffers that no checkpoint has:
`lora_down` [R, K] and `lora_up` [N, R] stay on the device that computes, also where the weights stream. Several LoRAs
share a pair of products.

The strengths are a tensor [R] that the products read: changing its numbers compiles nothing again, and captured graphs
see it. Like the scales of delayed FP8 it is no buffer, because what is streamed from the host would bring back old
values; and linears with the same ranks share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.ops.kernels.formats import Quantized


class LoraLinear(nn.Module):
    """What a linear's class is mixed with; see the module. Not made by itself: `attach` and `detach`."""

    lora_down: Tensor
    lora_up: Tensor
    lora_strength: Tensor  # float32 [R], where the linear computes

    def forward(self, x: Any) -> Tensor:
        """x as the linear takes it -> [..., N]."""
        out = super().forward(x)
        rows = out.flatten(0, -2)  # the product that was just made: nobody else has it
        inner = low_rank_input(x, self.lora_down) * self.lora_strength
        rows = rows.addmm_(inner.to(rows.dtype).flatten(0, -2), self.lora_up.t())
        return rows.unflatten(0, out.shape[:-1])


def low_rank_input(x: Tensor | Quantized, down: Tensor) -> Tensor:
    """x [..., K] @ down^T [K, R] -> [..., R]; FP8 numbers are exact in `down`'s dtype, and scales of rows wait until
    after the product, when there are few numbers left."""
    if isinstance(x, Tensor):
        return F.linear(x.to(down.dtype), down)
    scale, data = x.scale, x.data.to(down.dtype)
    if scale.ndim > 1 and scale.shape[-1] > 1:  # for blocks of a row
        data = (data.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None].to(down.dtype)).flatten(-2)
        return F.linear(data, down)
    return F.linear(data, down) * scale


@cache
def _with_lora(kind: type[nn.Module]) -> type[nn.Module]:
    return type(f"Lora{kind.__name__}", (LoraLinear, kind), {"__doc__": f"A {kind.__name__} with LoRAs attached."})


@torch.no_grad()
def attach(linear: nn.Module, pairs: Sequence[tuple[Tensor, Tensor]], strength: Tensor, dtype: torch.dtype) -> None:
    """Add LoRAs to `linear`, in place of any that were attached before.

    pairs: (up [N, r], down [r, K]) each; strength: float32 [R], R the sum of r, on the device that computes, and kept:
    whoever writes into it changes the strengths. dtype: of the two products, that of the activations.
    """
    detach(linear)
    home = strength.device
    linear.register_buffer("lora_up", torch.cat([up for up, _ in pairs], 1).to(home, dtype), persistent=False)
    linear.register_buffer("lora_down", torch.cat([down for _, down in pairs]).to(home, dtype), persistent=False)
    linear.__dict__["lora_strength"] = strength
    linear.__class__ = _with_lora(type(linear))


@torch.no_grad()
def move_attached(linear: nn.Module, device: torch.device) -> None:
    """Move what `attach` added. The strengths stay where they are."""
    for name in ("lora_up", "lora_down"):
        tensor = linear._buffers[name]
        assert tensor is not None
        linear._buffers[name] = tensor.to(device)


def is_attached(name: str) -> bool:
    """Whether a tensor of this name belongs to an attached LoRA."""
    return name.endswith((".lora_up", ".lora_down"))


def detach(linear: nn.Module) -> None:
    """The linear as it was before `attach`; nothing where none is attached."""
    if isinstance(linear, LoraLinear):
        del linear._buffers["lora_up"], linear._buffers["lora_down"], linear.__dict__["lora_strength"]
        linear._non_persistent_buffers_set -= {"lora_up", "lora_down"}
        linear.__class__ = type(linear).__mro__[2]

"""LoRAs attached to linears: the product goes on as it was, and a product of low rank is added to it.

    out = linear(x) + (x @ down^T * strength) @ up^T

Legend: M rows of activations, K inputs, N outputs, R the ranks of all attached LoRAs together.

Every linear of a transformer takes one (`wan_core.ops.quant.linear.LowRank`). The strengths are a tensor [R] that the
products read: changing its numbers compiles nothing again, and captured graphs see it. Linears with the same ranks
share it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wan_core.ops.quant.linear import LowRank


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
    """Whether a tensor of this name belongs to an attached LoRA. Such tensors stay on the device that computes, also
    where weights stream."""
    return name.endswith((".lora_up", ".lora_down"))


def detach(linear: LowRank) -> None:
    """The linear as it was before `attach`; nothing where none is attached."""
    linear.lora_up = linear.lora_down = None
    linear.lora_strength = None

"""Changes summed into weights while they are read, before they are quantised: a model with a LoRA that costs nothing
while it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wan_core.checkpoint.lora.change import Change
from wan_core.kernels.formats import Quantized, spread_scale
from wan_core.quant.packed import Packed


@dataclass(frozen=True)
class Merge:
    """`changes`: official parameter name -> changes with their strengths, in order. `device`: where the sums are made,
    in float32; a GPU does in a second what takes a CPU a minute."""

    changes: Mapping[str, tuple[tuple[Change, float], ...]]
    device: torch.device

    @torch.no_grad()
    def apply(self, values: Iterable[tuple[str, Any]], encoded: Collection[str]) -> Iterator[tuple[str, Any]]:
        """(official name, value) pairs with the changes summed in. The weights of the linears `encoded` stay float32,
        so that they are rounded once; others get their dtype back."""
        for name, value in values:
            changes = self.changes.get(name)
            if changes is None:
                yield name, value
                continue
            home = _home(value)
            total = dense(value, self.device)
            for change, strength in changes:
                total = change.apply(total, strength)
            keep = name.removesuffix(".weight") in encoded or not isinstance(value, Tensor)
            yield name, total.to(home) if keep else total.to(value.dtype).to(home)


def _home(value: Any) -> torch.device:
    if isinstance(value, Packed):
        return next(iter(value.parts.values())).device
    return value.data.device if isinstance(value, Quantized) else value.device


def dense(value: Any, device: torch.device) -> Tensor:
    """A stored value, a tensor, FP8 with scales or packed, as float32 numbers on `device`, in memory of its own."""
    if isinstance(value, Quantized):
        data, scale = value.data.to(device), value.scale.to(device)
        return data.float() * spread_scale(scale, data.shape)
    if isinstance(value, Packed):
        return value.to(device).dequantize(torch.float32)
    return value.to(device, torch.float32, copy=True)

"""Replaces the linears of a transformer by quantised ones.

Quantised are the attention and feed-forward matrices of the blocks: 99 % of the weights and of the FLOPs. Patch, text
and time embedding, modulation, norms and head keep their precision: they are small, and every token depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wan_core.config import OptionError
from wan_core.ops.quant.linear import QuantLinear
from wan_core.ops.quant.packed import Changed, Packed


@dataclass(frozen=True)
class Quantization:
    """How the linears of a transformer are quantised.

    device: where weights are encoded, even if they stay on the host: a GPU needs a second, a CPU a minute. as_stored:
    quantise only linears that the file stores in FP8; the others keep the file's precision.
    """

    kind: type[QuantLinear]
    device: torch.device
    keep_blocks: int = 0
    as_stored: bool = False


def swap_linears(model: nn.Module, kind: type[QuantLinear], names: Iterable[str], dtype: torch.dtype) -> None:
    """Replace the linears `names` by quantised ones on the meta device.

    dtype: of their biases and outputs. Raises OptionError for a shape that `kind` does not support.
    """
    for name in names:
        parent, _, last = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        reason = kind.why_not_shape(linear.out_features, linear.in_features)
        if reason is not None:
            raise OptionError(f"{name} is {linear.in_features} -> {linear.out_features}: {reason}")
        new = kind(linear.in_features, linear.out_features, linear.bias is not None, dtype)
        model.get_submodule(parent)._modules[last] = new


def encoded_weight(value: Tensor | Packed | Changed, quantization: Quantization) -> dict[str, Tensor]:
    """Parameter name -> value of a linear's encoded weight, on the device of `value`; of a packed one, where it was
    encoded. A weight that the file stores in the same format is kept, and so is its scale where LoRAs change it."""
    kind, device = quantization.kind, quantization.device
    if isinstance(value, Tensor):
        return {name: tensor.to(value.device) for name, tensor in kind.encode(value.to(device)).items()}
    if isinstance(value, Changed):
        stored, total = kind.adopt(value.stored.to(device)), value.total.to(device)
        return kind.encode(total) if stored is None else kind.change(stored, total)
    adopted = kind.adopt(value)
    return kind.encode(value.to(device).dequantize()) if adopted is None else adopted

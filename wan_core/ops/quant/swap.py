"""Replaces the linears of a transformer by quantised ones.

Quantised are the attention and feed-forward matrices of the blocks: 99 % of the weights and of the FLOPs. Patch, text
and time embedding, modulation, norms and head keep their precision: they are small, and every token depends on them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wan_core.config import OptionError
from wan_core.ops.kernels.formats import Quantized, spread_scale
from wan_core.ops.quant.linear import QuantLinear
from wan_core.ops.quant.packed import Packed


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


def encode_values(
    values: Iterable[tuple[str, Tensor | Quantized | Packed]], quantization: Quantization, names: frozenset[str]
) -> Iterator[tuple[str, Tensor]]:
    """(parameter name, value) pairs with the weights of the linears `names` encoded, one at a time, so that the whole
    model is never in memory in its old precision. Weights that the file stores in the same format are kept, where they
    are."""
    for name, value in values:
        linear, _, parameter = name.rpartition(".")
        if linear in names and parameter == "weight":
            for encoded_name, encoded in _encoded(value, quantization).items():
                target = encoded.device if isinstance(value, Packed) else device_of(value)
                yield f"{linear}.{encoded_name}", encoded.to(target)
        else:
            assert isinstance(value, Tensor)
            yield name, value


def device_of(value: Tensor | Quantized) -> torch.device:
    return value.data.device if isinstance(value, Quantized) else value.device


def _encoded(value: Tensor | Quantized | Packed, quantization: Quantization) -> dict[str, Tensor]:
    kind, device = quantization.kind, quantization.device
    if isinstance(value, Tensor):
        return kind.encode(value.to(device))
    adopted = kind.adopt(value)
    if adopted is not None:
        return adopted
    if isinstance(value, Packed):
        return kind.encode(value.to(device).dequantize())
    data, scale = value.data.to(device), value.scale.to(device)
    return kind.encode(data.float() * spread_scale(scale, data.shape))

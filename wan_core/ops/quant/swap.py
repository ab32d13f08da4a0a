"""Which linears of a transformer become FP8, and putting quantised ones in their place.

The attention and feed-forward matrices of the blocks: 99 % of the weights and of the arithmetic. Patch, text and time
embedding, modulation, norms and head keep their precision: they are small, and everything passes through them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wan_core.config import OptionError
from wan_core.ops.kernels.formats import Quantized, spread_scale
from wan_core.ops.quant.linear import QuantLinear


@dataclass(frozen=True)
class Quantization:
    """How the linears of a transformer are held. `device` is where weights are encoded: a GPU does in a second what
    takes a CPU a minute, also where they live on the host. as_stored: only those that the file holds so; the others
    keep what the file gives them."""

    kind: type[QuantLinear]
    device: torch.device
    keep_blocks: int = 0
    as_stored: bool = False


def swap_linears(model: nn.Module, kind: type[QuantLinear], names: Iterable[str], dtype: torch.dtype) -> None:
    """Put quantised linears without values (on the meta device) in the place of those called `names`.

    dtype: of their biases and outputs. Raises OptionError for a shape that `kind` cannot hold.
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
    values: Iterable[tuple[str, Tensor | Quantized]], quantization: Quantization, names: frozenset[str]
) -> Iterator[tuple[str, Tensor]]:
    """(parameter name, value) pairs with the weights of the linears `names` encoded, one at a time: the whole model
    never exists in its old precision. What is FP8 already is taken as it is where its scales fit the scheme."""
    for name, value in values:
        linear, _, parameter = name.rpartition(".")
        if linear in names and parameter == "weight":
            home = value.data.device if isinstance(value, Quantized) else value.device
            for encoded_name, encoded in _encoded(value, quantization).items():
                yield f"{linear}.{encoded_name}", encoded.to(home)
        else:
            assert isinstance(value, Tensor)
            yield name, value


def _encoded(value: Tensor | Quantized, quantization: Quantization) -> dict[str, Tensor]:
    kind, device = quantization.kind, quantization.device
    if isinstance(value, Tensor):
        return kind.encode(value.to(device))
    adopted = kind.adopt(value)
    if adopted is not None:
        return adopted
    data, scale = value.data.to(device), value.scale.to(device)
    return kind.encode(data.float() * spread_scale(scale, data.shape))

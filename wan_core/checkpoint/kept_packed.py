"""Which weights of a checkpoint stay as the file packs them, and how they are read."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from wan_core.checkpoint.detect import Detected
from wan_core.checkpoint.opened import Checkpoint
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.kernels.integer_weights import integer_format
from wan_core.ops.quant.packed import Packed, holds_tables
from wan_core.ops.quant.swap import Quantization


def packable(model: nn.Module, config: object, quantization: Quantization) -> set[str]:
    """Names of the modules that may stay packed: the linears that would be quantised of a transformer, all linears and
    the embedding table of a text encoder."""
    if isinstance(config, DiTConfig):
        return set(config.quantized_names(quantization.keep_blocks))
    return {name for name, m in model.named_modules() if isinstance(m, nn.Linear) or name == "token_embedding"}


def kept_packed(
    checkpoint: Checkpoint, found: Detected, module: nn.Module, quantization: Quantization, changed: Collection[str]
) -> dict[str, Packed]:
    """Module name -> its weight as the file packs it, FP8 with scales among others; not those that are `changed`."""
    packed_weights: dict[str, Packed] = {}
    for name in sorted(packable(module, found.config, quantization)):
        ours = f"{name}.weight"
        theirs = found.names[ours]
        info = checkpoint.tensors[theirs]
        table = isinstance(module.get_submodule(name), nn.Embedding) and not holds_tables(info.packing)
        if ours in changed or table:
            continue
        if info.packing is not None:
            packed_weights[name] = checkpoint.read_packed(theirs)
        elif ours in found.scales:
            parts = {"weight": checkpoint.read(theirs), "weight_scale": checkpoint.read(found.scales[ours]).float()}
            packed_weights[name] = Packed("fp8", info.shape, parts)
    return packed_weights


def int8_names(checkpoint: Checkpoint, found: Detected, module: nn.Module, quantization: Quantization) -> Iterator[str]:
    """Linears that may stay packed, and are stored in INT8."""
    for name in packable(module, found.config, quantization):
        fmt = integer_format(checkpoint.tensors[found.names[f"{name}.weight"]].packing or "")
        if fmt is not None and fmt.name == "int8_tensorwise" and isinstance(module.get_submodule(name), nn.Linear):
            yield name


def is_read_ahead(device: torch.device, work: torch.device) -> bool:
    """Whether weights that stay packed are read in many threads, as plain tensors are, instead of copied from the
    mapped file. device: where they go, work: where tensors are read to."""
    return device.type == work.type

"""Safetensors files with NVFP4 or MXFP8 matrices, as ComfyUI writes them, read as packed matrices.

The format of a matrix is in a tensor beside it (`X.comfy_quant`, JSON as bytes), or in the file's metadata for all
(`_quantization_metadata`). `X.weight` holds the numbers, `X.weight_scale` the scales of groups and, for NVFP4,
`X.weight_scale_2` the scale of the tensor; see `kernels.microscaling`. `X.input_scale` is not used, because activation
scales are measured. `scaled` reads FP8 matrices with scales, which may be in the same file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from wan_core.checkpoint.errors import CheckpointError
from wan_core.checkpoint.opened import Checkpoint, TensorInfo
from wan_core.ops.kernels.microscaling import GROUP, tiled_shape
from wan_core.ops.quant.packed import MICROSCALED, Packed

METADATA_KEY = "_quantization_metadata"
DESCRIPTION = "comfy_quant"
_BYTE = (torch.uint8, torch.int8)


def with_packed(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with one packed tensor for each NVFP4 or MXFP8 matrix, in place of its parts; unchanged if it has
    none. Raises `CheckpointError` if a part is missing, or parts do not match."""
    formats = {name: fmt for name, fmt in _formats(checkpoint).items() if fmt in MICROSCALED}
    if not formats:
        return checkpoint
    tensors = dict(checkpoint.tensors)
    parts: dict[str, dict[str, str]] = {}
    for module, fmt in formats.items():
        weight = f"{module}.weight"
        names = {"weight": weight, "weight_scale": f"{module}.weight_scale"}
        if fmt == "nvfp4":
            names["weight_scale_2"] = f"{module}.weight_scale_2"
        missing = [name for name in names.values() if name not in tensors]
        if missing:
            raise CheckpointError(
                f"{module} is marked as {fmt}, but {missing[0]} is missing. Download it again.",
                where=checkpoint.describe(),
            )
        shape = _shape(fmt, {part: tensors[name] for part, name in names.items()})
        if shape is None:
            stored = ", ".join(f"{part} {tensors[n].dtype} {list(tensors[n].shape)}" for part, n in names.items())
            raise CheckpointError(
                f"{module} is marked as {fmt}, but its parts do not match: {stored}", where=checkpoint.describe()
            )
        nbytes = sum(tensors[name].nbytes for name in names.values())
        for name in (*names.values(), f"{module}.input_scale", f"{module}.{DESCRIPTION}"):
            tensors.pop(name, None)
        tensors[weight] = TensorInfo(shape, torch.float32, nbytes, fmt)
        parts[weight] = names

    def read_packed(name: str) -> Packed:
        stored = {part: checkpoint.read(source) for part, source in parts[name].items()}
        stored["weight_scale"] = stored["weight_scale"].view(torch.uint8)
        if "weight_scale_2" in stored:
            stored["weight_scale_2"] = stored["weight_scale_2"].reshape(()).float()
        info = tensors[name]
        assert info.packing is not None
        return Packed(info.packing, info.shape, stored)

    return checkpoint.replaced(tensors=tensors, read_packed=read_packed)


def _shape(fmt: str, parts: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
    """The shape [N, K] of a matrix; None if its parts do not match."""
    weight, scales = parts["weight"], parts["weight_scale"]
    if len(weight.shape) != 2 or 0 in weight.shape:
        return None
    n, k = weight.shape
    if fmt == "nvfp4":
        k *= 2
        valid = weight.dtype in _BYTE and scales.dtype in (*_BYTE, torch.float8_e4m3fn)
        scale = parts["weight_scale_2"]
        valid = valid and scale.dtype.is_floating_point and all(size == 1 for size in scale.shape)
    else:
        valid = weight.dtype == torch.float8_e4m3fn and scales.dtype in _BYTE
    valid = valid and k % GROUP[fmt] == 0 and scales.shape == tiled_shape(n, k // GROUP[fmt])
    return (n, k) if valid else None


def _formats(checkpoint: Checkpoint) -> dict[str, str]:
    """Module -> format, for all modules that the file describes."""
    formats: dict[str, str] = {}
    metadata = _parsed(checkpoint.metadata.get(METADATA_KEY, ""))
    layers = metadata.get("layers") if isinstance(metadata, dict) else None
    for module, entry in layers.items() if isinstance(layers, dict) else ():
        formats[module] = _format(entry)
    for name, info in checkpoint.tensors.items():
        module, _, last = name.rpartition(".")
        if last == DESCRIPTION and info.dtype == torch.uint8 and info.nbytes <= 4096:
            formats[module] = _format(_parsed(bytes(checkpoint.read(name).flatten().tolist())))
    return formats


def _format(entry: object) -> str:
    value = entry.get("format") if isinstance(entry, dict) else entry
    return value if isinstance(value, str) else ""


def _parsed(text: str | bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

"""Safetensors files with NVFP4 or MXFP8 matrices, as ComfyUI writes them: each seen as one packed matrix.

Which matrix is in which format is said beside it (`X.comfy_quant`, JSON as bytes) or for all together in the file's
notes (`_quantization_metadata`). `X.weight` holds the numbers, `X.weight_scale` the scales of groups and, for NVFP4,
`X.weight_scale_2` that of the tensor; see `kernels.microscaling`. `X.input_scale` is not used, because activations are
measured. FP8 matrices with scales (`scaled`) may stand beside these and are left to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from wan_core.checkpoint.errors import CheckpointError
from wan_core.checkpoint.opened import Checkpoint, TensorInfo
from wan_core.ops.kernels.microscaling import GROUP, tiled_shape
from wan_core.ops.quant.packed import MICROSCALED, Packed

NOTE = "_quantization_metadata"
DESCRIPTION = "comfy_quant"
_BYTE = (torch.uint8, torch.int8)


def with_packed(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with one packed tensor in the place of the parts of each NVFP4 or MXFP8 matrix; itself where it has
    none. Raises `CheckpointError`: a matrix that lacks a part, or whose parts do not fit."""
    formats = {name: fmt for name, fmt in _formats(checkpoint).items() if fmt in MICROSCALED}
    if not formats:
        return checkpoint
    tensors = dict(checkpoint.tensors)
    parts: dict[str, dict[str, str]] = {}
    for module, fmt in formats.items():
        weight = f"{module}.weight"
        own = {"weight": weight, "weight_scale": f"{module}.weight_scale"}
        if fmt == "nvfp4":
            own["weight_scale_2"] = f"{module}.weight_scale_2"
        missing = [name for name in own.values() if name not in tensors]
        if missing:
            raise CheckpointError(
                f"{module} is said to be {fmt}, but {missing[0]} is missing. Download it again.",
                where=checkpoint.describe(),
            )
        shape = _shape(fmt, {part: tensors[name] for part, name in own.items()})
        if shape is None:
            found = ", ".join(f"{part} {tensors[n].dtype} {list(tensors[n].shape)}" for part, n in own.items())
            raise CheckpointError(
                f"{module} is said to be {fmt}, and its parts do not fit: {found}", where=checkpoint.describe()
            )
        nbytes = sum(tensors[name].nbytes for name in own.values())
        for name in (*own.values(), f"{module}.input_scale", f"{module}.{DESCRIPTION}"):
            tensors.pop(name, None)
        tensors[weight] = TensorInfo(shape, torch.float32, nbytes, fmt)
        parts[weight] = own

    def read_packed(name: str) -> Packed:
        found = {part: checkpoint.read(source) for part, source in parts[name].items()}
        found["weight_scale"] = found["weight_scale"].view(torch.uint8)
        if "weight_scale_2" in found:
            found["weight_scale_2"] = found["weight_scale_2"].reshape(()).float()
        info = tensors[name]
        assert info.packing is not None
        return Packed(info.packing, info.shape, found)

    return checkpoint.replaced(tensors=tensors, read_packed=read_packed)


def _shape(fmt: str, parts: Mapping[str, TensorInfo]) -> tuple[int, int] | None:
    """[N, K] of a matrix whose parts fit each other; None where they do not."""
    weight, scales = parts["weight"], parts["weight_scale"]
    if len(weight.shape) != 2 or 0 in weight.shape:
        return None
    n, k = weight.shape
    if fmt == "nvfp4":
        k *= 2
        sound = weight.dtype in _BYTE and scales.dtype in (*_BYTE, torch.float8_e4m3fn)
        last = parts["weight_scale_2"]
        sound = sound and last.dtype.is_floating_point and all(size == 1 for size in last.shape)
    else:
        sound = weight.dtype == torch.float8_e4m3fn and scales.dtype in _BYTE
    sound = sound and k % GROUP[fmt] == 0 and scales.shape == tiled_shape(n, k // GROUP[fmt])
    return (n, k) if sound else None


def _formats(checkpoint: Checkpoint) -> dict[str, str]:
    """Module -> format, of those that the file describes."""
    found: dict[str, str] = {}
    noted = _parsed(checkpoint.metadata.get(NOTE, ""))
    layers = noted.get("layers") if isinstance(noted, dict) else None
    for module, entry in layers.items() if isinstance(layers, dict) else ():
        found[module] = _format(entry)
    for name, info in checkpoint.tensors.items():
        module, _, last = name.rpartition(".")
        if last == DESCRIPTION and info.dtype == torch.uint8 and info.nbytes <= 4096:
            found[module] = _format(_parsed(bytes(checkpoint.read(name).flatten().tolist())))
    return found


def _format(entry: object) -> str:
    value = entry.get("format") if isinstance(entry, dict) else entry
    return value if isinstance(value, str) else ""


def _parsed(text: str | bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

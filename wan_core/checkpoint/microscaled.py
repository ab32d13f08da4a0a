"""Safetensors files with NVFP4, MXFP8, INT8 or 4-bit matrices, as ComfyUI writes them, read as packed matrices.

`descriptions` says which matrices these are. `X.weight` holds the numbers, `X.weight_scale` the scales of groups and,
for NVFP4, `X.weight_scale_2` the scale of the tensor; see `ops.quant.mx`. `X.input_scale` is not used, because
activation scales are measured. `scaled` reads FP8 matrices with scales, which may be in the same file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from wan_core.checkpoint.comfyui_tensors import (
    DESCRIPTION,
    OPTIONAL,
    PARTS,
    described_format,
    descriptions,
    matrix_shape,
    read_integers,
)
from wan_core.checkpoint.opened import Checkpoint, CheckpointError, Read, TensorInfo, part_name
from wan_core.ops.quant.mx import GROUP, tiled_shape
from wan_core.ops.quant.packed import INTEGERS, MICROSCALED, Packed

_BYTE = (torch.uint8, torch.int8)


def with_packed(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with one packed tensor for each matrix of these formats, in place of its parts; unchanged if it has
    none. Raises `CheckpointError` if a format is not known, a part is missing, or parts do not match."""
    entries = {name: entry for name, entry in descriptions(checkpoint).items() if entry["format"] in PARTS}
    if not entries:
        return checkpoint
    tensors = dict(checkpoint.tensors)
    sources: dict[str, str] = {}  # of parts: their names in the file
    parts: dict[str, dict[str, TensorInfo]] = {}
    for module, entry in entries.items():
        fmt = str(entry["format"])
        weight = f"{module}.weight"
        names = {part: f"{module}.{part}" for part in ("weight", *PARTS[fmt])}
        optional = {part: f"{module}.{part}" for part in OPTIONAL.get(fmt, ())}
        missing = [name for name in names.values() if name not in tensors]
        if missing:
            raise CheckpointError(f"{module} is marked as {fmt}, but {missing[0]} is missing. Download it again.")
        names |= {part: name for part, name in optional.items() if name in tensors}
        packing, shape = _described(module, entry, {part: tensors[n] for part, n in names.items()})
        nbytes = sum(tensors[name].nbytes for name in names.values())
        for name in (*names.values(), f"{module}.input_scale", f"{module}.{DESCRIPTION}"):
            tensors.pop(name, None)
        tensors[weight] = TensorInfo(shape, torch.float32, nbytes, packing)
        parts[weight] = {part_name(weight, part): checkpoint.tensors[source] for part, source in names.items()}
        sources |= {part_name(weight, part): source for part, source in names.items()}

    def read(name: str) -> Tensor:
        return checkpoint.read(sources.get(name, name))

    def read_packed(name: str, ahead: Read | None) -> Packed:
        stored = {part.rpartition(":")[2]: (ahead or read)(part) for part in parts[name]}
        info = tensors[name]
        assert info.packing is not None
        if info.packing not in MICROSCALED:
            return Packed(info.packing, info.shape, read_integers(info.packing, stored))
        stored["weight_scale"] = stored["weight_scale"].view(torch.uint8)
        if "weight_scale_2" in stored:
            stored["weight_scale_2"] = stored["weight_scale_2"].reshape(()).float()
        return Packed(info.packing, info.shape, stored)

    plain = {name: name for name, info in tensors.items() if info.packing is None}
    return replace(
        checkpoint,
        tensors=tensors,
        reader=read,
        packed_reader=read_packed,
        places={n: checkpoint.places[s] for n, s in (plain | sources).items() if s in checkpoint.places},
        parts=parts,
    )


def _described(
    module: str, entry: Mapping[str, object], parts: Mapping[str, TensorInfo]
) -> tuple[str, tuple[int, int]]:
    """The packing of a matrix and its shape [N, K]. Raises `CheckpointError`."""
    packing = str(entry["format"])
    try:
        if packing in INTEGERS:
            described = described_format(entry)
            packing, shape = described.text, matrix_shape(described, parts)
        else:
            shape = _shape(packing, parts)
    except ValueError as fault:
        raise CheckpointError(f"{module} is marked as {packing}, but {fault}") from None
    if shape is None:
        stored = ", ".join(f"{part} {info.dtype} {list(info.shape)}" for part, info in parts.items())
        raise CheckpointError(f"{module} is marked as {packing}, but its parts do not match: {stored}")
    return packing, shape


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

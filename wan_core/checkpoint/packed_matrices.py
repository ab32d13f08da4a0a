"""Quantised matrices of safetensors files, as ComfyUI and others write them, in the form of packed matrices: FP8 with
scales, NVFP4, MXFP8, INT8 and 4 bits.

`descriptions` says which matrices are of these formats. `X.weight` holds the numbers, `X.weight_scale` the scales of
groups and, for NVFP4, `X.weight_scale_2` the scale of the tensor; see `ops.quant.mx`. FP8 needs no description, and its
scale may be called `X.scale_weight`: one number, one per output channel, or one per 128 x 128 weights. Scales of
activations (`X.scale_input`, `X.input_scale`) are not used: the engine measures activations during the run. Two numbers
in `scaled_fp8`, or `full_precision_matrix_mult` in a description, ask for products in 16 bits (ComfyUI's utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from wan_core.checkpoint.comfyui_tensors import (
    DESCRIPTION,
    OPTIONAL,
    PARTS,
    SCALED,
    WIDE,
    described_format,
    descriptions,
    is_preference,
    matrix_shape,
)
from wan_core.checkpoint.opened import Checkpoint, CheckpointError, TensorInfo, counted, listing, part_name
from wan_core.ops.kernels.formats import BLOCK
from wan_core.ops.quant.mx import GROUP, tiled_shape
from wan_core.ops.quant.packed import INTEGERS

_SCALES = ("scale_weight", "weight_scale")  # of FP8
MARKER = "scaled_fp8"
_UNUSED = ("scale_input", "input_scale", MARKER, DESCRIPTION)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BYTE = (torch.uint8, torch.int8)
_SCALED = "a checkpoint with scaled (quantised) weights"


def with_packed(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with one packed tensor for each matrix of these formats, in place of its parts, and without what a
    file says to ComfyUI alone. Raises `CheckpointError` if a format is not known, a part is missing, or parts do not
    match."""
    file = _File({name: info for name, info in checkpoint.tensors.items() if not is_preference(name)})
    if not file.tensors:
        raise CheckpointError(
            "it holds no weights, only which attention ComfyUI should use; here the option attention decides: leave "
            "the file out"
        )
    described = descriptions(checkpoint)
    wide = any(name.rpartition(".")[2] == MARKER and info.shape == (2,) for name, info in checkpoint.tensors.items())
    wide = wide or any(entry["format"] in SCALED and entry.get(WIDE) for entry in described.values())
    for module, entry in described.items():
        if entry["format"] in PARTS:
            file.pack_described(module, entry)
    file.pack_scaled()
    if not file.parts:
        return replace(checkpoint, tensors=file.tensors, wide=wide)
    names, places = file.sources, checkpoint.places
    moved = {part: places[name] for part, name in names.items() if name in places}
    return replace(
        checkpoint,
        tensors=file.tensors,
        reader=lambda name: checkpoint.reader(names.get(name) or name),
        places={name: at for name, at in places.items() if name not in file.parts} | moved,
        parts={**checkpoint.parts, **file.parts},
        wide=wide,
    )


@dataclass
class _File:
    """The tensors of a file, whose matrices are packed one by one. `parts`: packed matrix -> what it consists of.
    `sources`: part -> its name in the file."""

    tensors: dict[str, TensorInfo]
    parts: dict[str, Mapping[str, TensorInfo]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def pack_described(self, module: str, entry: Mapping[str, object]) -> None:
        """Pack the matrix of `module`, whose description is `entry`. Raises CheckpointError."""
        fmt = str(entry["format"])
        names = {part: f"{module}.{part}" for part in ("weight", *PARTS[fmt])}
        missing = [name for name in names.values() if name not in self.tensors]
        if missing:
            raise CheckpointError(f"{module} is marked as {fmt}, but {missing[0]} is missing. Download it again.")
        optional = {part: f"{module}.{part}" for part in OPTIONAL.get(fmt, ())}
        names |= {part: name for part, name in optional.items() if name in self.tensors}
        packing, shape = _described(module, entry, {part: self.tensors[name] for part, name in names.items()})
        self._pack(packing, shape, names)
        for unused in ("input_scale", DESCRIPTION):
            self.tensors.pop(f"{module}.{unused}", None)

    def pack_scaled(self) -> None:
        """Pack every matrix in FP8 with scales. Raises CheckpointError for a scale without its weight, an FP8 matrix
        without a scale where others have one, or an impossible shape."""
        last_words = {name: name.rpartition(".")[2] for name in self.tensors if name not in self.parts}
        scales = {name.removesuffix(last) + "weight": name for name, last in last_words.items() if last in _SCALES}
        unused = [name for name, last in last_words.items() if last in _UNUSED]
        infos = self.tensors
        bare = [n for n, info in infos.items() if info.dtype in _FP8 and len(info.shape) == 2 and n not in scales]
        if not scales and not (unused and bare):  # FP8 without scales: the stored numbers are the weights
            return
        alone = [name for weight, name in scales.items() if weight not in infos or infos[weight].packing]
        if alone or bare:
            missing = (
                counted(alone, "scales without a weight") if alone else counted(bare, "FP8 matrices without a scale")
            )
            raise CheckpointError(f"{_SCALED}, but {missing}. Download it again.")
        unsupported = [name for weight, name in scales.items() if not _fits(infos[weight].shape, infos[name].shape)]
        if unsupported:
            raise CheckpointError(
                f"{_SCALED}, but {len(unsupported)} scales have a shape that is not supported ({listing(unsupported)}):"
                " one number, one per row, or one per 128 x 128 weights are."
            )
        for weight, name in scales.items():
            if infos[weight].dtype.is_floating_point:  # others stay, and `detect` refuses them
                self._pack("fp8", infos[weight].shape, {"weight": weight, "weight_scale": name})
        for name in unused:
            del self.tensors[name]

    def _pack(self, packing: str, shape: tuple[int, ...], names: Mapping[str, str]) -> None:
        """Put a packed matrix in the place of its parts. names: part -> its name in the file, that of "weight" first,
        which the matrix keeps."""
        weight = names["weight"]
        infos = {part: self.tensors.pop(name) for part, name in names.items()}
        nbytes = sum(info.nbytes for info in infos.values())
        self.tensors[weight] = TensorInfo(shape, torch.float32, nbytes, packing)
        self.parts[weight] = {part_name(weight, part): info for part, info in infos.items()}
        self.sources |= {part_name(weight, part): name for part, name in names.items()}


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


def _fits(weight: tuple[int, ...], scale: tuple[int, ...]) -> bool:
    """Whether a scale of FP8 has one number, one per row, or one per block."""
    if all(size == 1 for size in scale):
        return True
    if len(weight) != 2:
        return False
    n, k = weight
    return scale in ((n,), (n, 1), (-(-n // BLOCK), -(-k // BLOCK)))

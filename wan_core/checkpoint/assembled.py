"""Tensors that a layout stores in parts or in other shapes than the official one, put together when they are read."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wan_core.checkpoint.opened import Checkpoint, TensorInfo
from wan_core.models.wan.families import FAMILIES
from wan_core.models.wan.families.family import Assembled


def with_assembled(checkpoint: Checkpoint) -> Checkpoint:
    """`checkpoint` with what a family's layout stores in parts under one name, and without the parts. Parts that are
    packed, scaled or of different dtypes stay as they are, and `detect` says that they are unexpected."""
    tensors = checkpoint.tensors
    shapes = {name: info.shape for name, info in tensors.items()}
    wanted: dict[str, Assembled] = {}
    for family in FAMILIES.values():
        wanted |= {name: one for name, one in family.assembled(shapes).items() if _plain(checkpoint, one)}
    if not wanted:
        return checkpoint
    gone = {part for one in wanted.values() for part in one.parts}
    infos = {name: info for name, info in tensors.items() if name not in gone}
    for name, one in wanted.items():
        parts = [tensors[part] for part in one.parts]
        infos[name] = TensorInfo(one.shape, parts[0].dtype, sum(part.nbytes for part in parts))
    places = {name: at for name, at in checkpoint.places.items() if name in infos and name not in wanted}
    return checkpoint.replaced(tensors=infos, read=_reader(checkpoint.read, wanted), places=places)


def _plain(checkpoint: Checkpoint, one: Assembled) -> bool:
    parts = [checkpoint.tensors[part] for part in one.parts]
    return len({part.dtype for part in parts}) == 1 and all(part.packing is None for part in parts)


def _reader(read: Callable[[str], Tensor], wanted: dict[str, Assembled]) -> Callable[[str], Tensor]:
    def assemble(name: str) -> Tensor:
        if name not in wanted:
            return read(name)
        parts = [read(part) for part in wanted[name].parts]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(wanted[name].shape)

    return assemble

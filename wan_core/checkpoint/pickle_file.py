"""Torch checkpoints (`.pth`, `.pt`, `.bin`): zip archives of a pickle and one stored member per tensor storage.

torch reads them with `weights_only=True`, which runs no code. Its list of allowed names includes some that allocate any
number of bytes (`UntypedStorage`, `bytearray`), so the pickle's size and names are checked before.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wan_core.checkpoint.errors import CheckpointError, listing
from wan_core.checkpoint.opened import Checkpoint, from_state_dict, short_path

MAX_PICKLE = 64 * 1024 * 1024  # the pickle holds names and shapes only: 0.2 MB for the largest Wan checkpoint
_NESTED = ("state_dict", "model", "model_state_dict", "module")

# Names that a state dict of ordinary tensors needs.
_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_ALLOWED = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {kind}Storage" for kind in _STORAGES),
}

# What `zipfile` and the weights-only unpickler raise on bytes that `torch.save` never wrote. They interpret the file's
# instructions, so almost any error type can come out; each of them means that the file is damaged.
_FAULTS = (
    zipfile.BadZipFile,
    struct.error,
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def open_pickle(path: Path) -> Checkpoint:
    """Check the pickle, then let torch map the storages. Raises `CheckpointError` on any fault."""
    where = short_path(path)
    try:
        _check_program(_program(path, where), where)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch's own unpickler
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except _FAULTS as fault:
        line = (str(fault).strip().splitlines() or [""])[0][:200]
        raise CheckpointError(
            f"damaged archive ({type(fault).__name__}: {line}). Download it again.", where=where
        ) from None
    return from_state_dict(_state_dict(loaded, where), where, path)


def _program(path: Path, where: str) -> bytes:
    """The archive's one pickle, which must be small and uncompressed."""
    with zipfile.ZipFile(path) as archive:
        pickles = [member for member in archive.infolist() if member.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE or pickles[0].compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                "a zip archive, but not one that torch.save wrote (it has no data.pkl, or a compressed one). If it is a"
                " download, unpack it first.",
                where=where,
            )
        return archive.read(pickles[0])


def _check_program(program: bytes, where: str) -> None:
    """The pickle may name tensors and containers, nothing else."""
    refused: set[str] = set()
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.name == "GLOBAL":
            if argument not in _ALLOWED:
                refused.add(str(argument).replace(" ", "."))
        elif opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"):
            refused.add(opcode.name)
    if refused:
        raise CheckpointError(
            f"refused: its pickle asks for {listing(sorted(refused))}. A checkpoint may hold tensors only:"
            " anything else can run code on this machine. Use a safetensors file.",
            where=where,
        )


def _state_dict(loaded: Any, where: str) -> Mapping[str, Tensor]:
    """The named tensors, also where a training script has put them one level down."""
    if isinstance(loaded, dict):
        # A pickle may give an OrderedDict attributes that hide its methods: ask the type, not the object.
        found = dict(dict.items(loaded))
        inner = next((found[key] for key in _NESTED if isinstance(found.get(key), dict)), None)
        return found if inner is None else dict(dict.items(inner))
    raise CheckpointError(
        f"a state dict of named tensors was expected, but it holds a {type(loaded).__name__}", where=where
    )

"""Torch checkpoints (`.pth`, `.pt`, `.bin`): zip archives of a pickle and one stored member per tensor storage.

Checked before torch reads them: the archive's structure, that every member lies in the file uncompressed, and that
the pickle asks for nothing but tensors. So a damaged or hostile file is refused in words, and cannot run code or make
torch allocate.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wan_core.checkpoint.errors import CheckpointError, listing
from wan_core.checkpoint.opened import Checkpoint, from_state_dict, short_path

MAX_PICKLE = 64 * 1024 * 1024  # the pickle holds names and shapes only: 0.2 MB for the largest Wan checkpoint
_NESTED = ("state_dict", "model", "model_state_dict", "module")

# Names of a state dict of ordinary tensors. Not among them: UntypedStorage, which a pickle can call with any size.
_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_ALLOWED = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {kind}Storage" for kind in _STORAGES),
}

# What `zipfile` and the weights-only unpickler raise on bytes that were never written by `torch.save`. They interpret
# the file's instructions, so almost any error type can come out; each of them means that the file is damaged.
_ARCHIVE_FAULTS = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    ValueError,
    LookupError,
    NotImplementedError,
    RuntimeError,
)
_UNPICKLING_FAULTS = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)


def open_pickle(path: Path) -> Checkpoint:
    """Check the archive, then let torch map its storages. Raises `CheckpointError` on any fault."""
    where = short_path(path)
    try:
        program = _check_archive(path, where)
    except _ARCHIVE_FAULTS as fault:
        if isinstance(fault, CheckpointError):
            raise
        raise CheckpointError(f"damaged archive ({_brief(fault)}). Download it again.", where=where) from None
    _check_program(program, where)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch's own unpickler
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except _UNPICKLING_FAULTS as fault:
        raise CheckpointError(
            f"damaged: torch cannot load it ({_brief(fault)}). Download it again.", where=where
        ) from None
    return from_state_dict(_state_dict(loaded, where), where, path)


def _check_archive(path: Path, where: str) -> bytes:
    """Every member uncompressed and inside the file; returns the pickle."""
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                raise CheckpointError(
                    f"not a torch checkpoint: its member {member.filename[:80]} is compressed", where=where
                )
            if member.flag_bits & 0x1:
                raise CheckpointError("not a torch checkpoint: it is encrypted", where=where)
            if member.header_offset < 0 or member.header_offset + member.compress_size > size:
                raise CheckpointError(
                    f"truncated: its member {member.filename[:80]} reaches beyond the end", where=where
                )
        pickles = [member for member in archive.infolist() if member.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE:
            raise CheckpointError(
                "a zip archive, but not one that torch.save wrote (no data.pkl). If it is a download, unpack it first.",
                where=where,
            )
        return archive.read(pickles[0])


def _check_program(program: bytes, where: str) -> None:
    """The pickle may name tensors and containers, nothing else."""
    strangers: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "GLOBAL":
                if argument not in _ALLOWED:
                    strangers.append(str(argument).replace(" ", "."))
            elif opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"):
                strangers.append(opcode.name)
    except (ValueError, LookupError, struct.error) as fault:
        raise CheckpointError(f"damaged pickle ({_brief(fault)}). Download it again.", where=where) from None
    if strangers:
        raise CheckpointError(
            f"refused: its pickle asks for {listing(sorted(set(strangers)))}. A checkpoint may hold tensors only:"
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


def _brief(fault: BaseException) -> str:
    lines = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {lines[0][:200]}" if lines else type(fault).__name__

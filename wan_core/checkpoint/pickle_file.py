"""Torch checkpoints (`.pth`, `.pt`, `.bin`): zip archives of a pickle and one stored member per tensor storage.

torch reads them with `weights_only=True`, which runs no code. Its list of allowed names includes some that allocate any
number of bytes (`UntypedStorage`, `bytearray`), so the pickle's size and names are checked before.
"""

from __future__ import annotations

import io
import os
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

from wan_core.checkpoint.opened import Checkpoint, CheckpointError, from_state_dict, listing, short_path
from wan_core.config.limits import MAX_DIRECTORY, MAX_PICKLE, MAX_TENSORS

MAX_OPERATIONS = 25 * MAX_TENSORS  # torch.save writes about 25 for each tensor
# Where training scripts put a model's tensors; the first that is there is taken. "generator": beside it is a critic.
_NESTED = ("state_dict", "model", "model_state_dict", "module", "generator_ema", "generator")
MAX_LEVELS = 3  # of dicts in dicts

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
    try:
        _check_program(_program(path))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside torch's own unpickler
            loaded = _loaded(path)
    except CheckpointError:
        raise
    except _FAULTS as fault:
        line = (str(fault).strip().splitlines() or [""])[0][:200]
        raise CheckpointError(f"damaged archive ({type(fault).__name__}: {line}). Download it again.") from None
    return from_state_dict(_state_dict(loaded), short_path(path), path)


def _loaded(path: Path) -> Any:
    if path.suffix != ".safetensors":
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # By this name newer versions of torch take a file for safetensors, whatever it holds; without one it is not mapped.
    with path.open("rb") as file:
        return torch.load(file, map_location="cpu", weights_only=True)


class _Archive(io.BufferedReader):
    """A file that refuses large reads: `zipfile` reads the list of members at once, and makes an object of each."""

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = size if size is not None and size >= 0 else os.fstat(self.fileno()).st_size - self.tell()
        if wanted > MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"its list of members has {wanted} bytes, and at most {MAX_DIRECTORY} are read")
        return super().read(size)


def _program(path: Path) -> bytes:
    """The archive's one pickle, which must be small and uncompressed."""
    with _Archive(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
        # torch finds the member whatever the case of its name.
        members = archive.infolist()
        pickles = [member for member in members if member.filename.lower().endswith("/data.pkl")]
        if len(pickles) != 1 or any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise CheckpointError(
                "a zip archive, but not one that torch.save wrote (it has no data.pkl, or compressed members). If it is"
                " a download, unpack it first."
            )
        claimed, size = sum(member.file_size for member in members), path.stat().st_size
        if claimed > size:
            raise CheckpointError(
                f"damaged archive: its members claim {claimed} bytes, the file has {size}. Download it again."
            )
        if pickles[0].file_size > MAX_PICKLE:
            raise CheckpointError(
                f"its data.pkl has {pickles[0].file_size} bytes, and at most {MAX_PICKLE} are read. Save the state dict"
                " alone, or use a safetensors file."
            )
        return archive.read(pickles[0])


def _check_program(program: bytes) -> None:
    """The pickle may name tensors and containers, nothing else."""
    refused: set[str] = set()
    for count, (opcode, argument, _) in enumerate(pickletools.genops(program)):
        if count > MAX_OPERATIONS:
            raise CheckpointError(
                f"its pickle has more than {MAX_OPERATIONS} instructions, {MAX_TENSORS} tensors need fewer. Use a"
                " safetensors file."
            )
        if opcode.name == "GLOBAL":
            if argument not in _ALLOWED:
                refused.add(str(argument).replace(" ", "."))
        elif opcode.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"):
            refused.add(opcode.name)
    if refused:
        raise CheckpointError(
            f"refused: its pickle asks for {listing(sorted(refused))}. A checkpoint may hold tensors only:"
            " anything else can run code on this machine. Use a safetensors file."
        )


def _state_dict(loaded: Any) -> Mapping[str, Tensor]:
    """The named tensors, also where a training script has put them some levels down: under a name of `_NESTED`, or as
    the only dict. Raises CheckpointError where several could be meant."""
    if not isinstance(loaded, dict):
        raise CheckpointError(f"a state dict of named tensors was expected, but it holds a {type(loaded).__name__}")
    for _ in range(MAX_LEVELS):
        # A pickle may give an OrderedDict attributes that hide its methods: ask the type, not the object.
        entries = dict(dict.items(loaded))
        inner = [key for key, value in entries.items() if isinstance(value, dict)]
        named = [key for key in _NESTED if key in inner]
        if not inner or (not named and any(isinstance(value, Tensor) for value in entries.values())):
            break
        if not named and len(inner) > 1:
            raise CheckpointError(
                f"it holds several dicts ({listing(list(map(str, inner)))}), and which is the model is not known. Save "
                "that one alone."
            )
        loaded = entries[(named or inner)[0]]
    return dict(dict.items(loaded))

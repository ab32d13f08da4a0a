"""Safetensors files, parsed here so that every byte of the header is checked before anything is allocated or mapped.

The format: 8 bytes, the header's length N, little-endian; N bytes of JSON, name -> {"dtype", "shape", "data_offsets":
[begin, end]}, offsets counted from the end of the header, plus an optional `__metadata__` of strings; then the
values, without holes. Source: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import json
import math
import mmap
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wan_core.checkpoint.errors import CheckpointError
from wan_core.checkpoint.opened import Checkpoint, TensorInfo, short_path

MAX_HEADER = 100_000_000  # the reference reader's limit
MAX_DIMENSIONS = 8

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.uint8,  # powers of two, as bytes: torch has the type only since 2.7
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


def open_safetensors(path: Path) -> Checkpoint:
    """Check the header and map the values, copy-on-write. Raises `CheckpointError` on any fault."""
    where = short_path(path)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        begin, header = _header(file.read, size, where)
        metadata = _metadata(header.pop("__metadata__", {}), where)
        placed = {name: _placed(name, entry, where) for name, entry in header.items()}
        _check_layout(placed, size - begin, where)
        mapping = map_file(file.fileno())
    tensors = {name: info for name, (info, _) in placed.items()}
    offsets = {name: begin + offset for name, (_, offset) in placed.items()}
    return Checkpoint(where, path, tensors, metadata, lambda name: _view(mapping, tensors[name], offsets[name]))


def _header(read: Callable[[int], bytes], size: int, where: str) -> tuple[int, dict[str, Any]]:
    """Where the values begin, and the header as parsed JSON."""
    if size < 10:
        raise CheckpointError(
            f"truncated: {size} bytes cannot hold a safetensors header. Download it again.", where=where
        )
    length = int.from_bytes(read(8), "little")
    if length > MAX_HEADER:
        raise CheckpointError(
            f"damaged: its header claims {length} bytes, and at most {MAX_HEADER} are allowed. Download it again.",
            where=where,
        )
    if 8 + length > size:
        raise CheckpointError(
            f"truncated: its header needs {8 + length} bytes, the file has {size}. Download it again.", where=where
        )
    try:
        # The parser's own limits (nesting depth, digits of a number) are faults of the file too.
        header = json.loads(read(length).decode("utf-8"), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as fault:
        raise CheckpointError(f"damaged header ({fault}). Download it again.", where=where) from None
    if not isinstance(header, dict):
        raise CheckpointError("damaged header (not a JSON object). Download it again.", where=where)
    return 8 + length, header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name[:120]} appears twice")
        found[name] = value
    return found


def _metadata(found: Any, where: str) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise CheckpointError("damaged header (its __metadata__ is not a table of strings)", where=where)
    return found


def _placed(name: str, entry: Any, where: str) -> tuple[TensorInfo, int]:
    """A header entry, checked by itself: the tensor's description and its offset from the first value."""

    def fault(text: str) -> CheckpointError:
        return CheckpointError(f"damaged header (tensor {name[:120]}: {text}). Download it again.", where=where)

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise fault("it needs a dtype, a shape and data_offsets, and nothing else")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPES:
        raise CheckpointError(
            f"tensor {name[:120]} has the dtype {str(kind)[:40]}, which this version cannot read; it reads "
            f"{', '.join(DTYPES)}",
            where=where,
        )
    if not _naturals(shape) or len(shape) > MAX_DIMENSIONS:
        raise fault(f"its shape is not a list of at most {MAX_DIMENSIONS} sizes")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fault("its data_offsets are not a begin and an end")
    dtype = DTYPES[kind]
    # With zeros counted as ones: an empty tensor's other sizes must still fit into 64-bit strides.
    if math.prod(max(n, 1) for n in shape) * dtype.itemsize >= 2**63:
        raise fault(f"its shape {shape} is too large for any memory")
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise fault(f"{kind} {shape} takes {nbytes} bytes, its offsets span {offsets[1] - offsets[0]}")
    return TensorInfo(tuple(shape), dtype, nbytes), offsets[0]


def _naturals(value: Any) -> bool:
    # `type` rather than `isinstance`: true and false are not sizes.
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _check_layout(placed: dict[str, tuple[TensorInfo, int]], available: int, where: str) -> None:
    """The values follow one another without hole or overlap, and end where the file ends."""
    expected = 0
    for name, (info, offset) in sorted(placed.items(), key=lambda item: (item[1][1], item[1][0].nbytes)):
        if offset != expected:
            what = "overlaps the tensor before it" if offset < expected else "leaves a hole before it"
            raise CheckpointError(f"damaged header (tensor {name[:120]} {what}). Download it again.", where=where)
        expected = offset + info.nbytes
    if expected > available:
        raise CheckpointError(
            f"truncated: the header promises {expected} bytes of values, the file has {available}. Download it again.",
            where=where,
        )
    if expected < available:
        raise CheckpointError(
            f"damaged: {available - expected} bytes follow the last tensor. Download it again.", where=where
        )
    if not placed:
        raise CheckpointError("it holds no tensors", where=where)


def map_file(fileno: int) -> mmap.mmap:
    """The whole file, copy-on-write."""
    if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
        # Private and writable, so that torch takes it without a warning. Without NORESERVE (which Python's mmap
        # module names only since 3.13) Linux refuses to map a file larger than memory, although nothing is ever
        # written.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return mmap.mmap(fileno, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(fileno, 0, access=mmap.ACCESS_COPY)


def _view(mapping: mmap.mmap, info: TensorInfo, offset: int) -> Tensor:
    if not info.nbytes:
        return torch.empty(info.shape, dtype=info.dtype)
    if offset % info.dtype.itemsize:
        # The format does not promise alignment, kernels need it: this one tensor is copied.
        copy = bytearray(memoryview(mapping)[offset : offset + info.nbytes])
        return torch.frombuffer(copy, dtype=info.dtype).reshape(info.shape)
    count = info.nbytes // info.dtype.itemsize
    return torch.frombuffer(mapping, dtype=info.dtype, count=count, offset=offset).reshape(info.shape)

"""Safetensors files: the `safetensors` library checks the header; tensors are mapped from the file and written to it.

The format: 8 bytes, the header's length N, little-endian; N bytes of JSON, name -> {"dtype", "shape", "data_offsets":
[begin, end]}, offsets counted from the end of the header, plus an optional `__metadata__` of strings; then the
values, without holes. Source: https://github.com/huggingface/safetensors (README, "Format").

Values are mapped here and not by the library because its mapping fails for a file that is larger than memory.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wan_core.checkpoint.opened import Checkpoint, CheckpointError, TensorInfo, check_names, short_path
from wan_core.config.limits import MAX_HEADER, MAX_TENSORS

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
    with path.open("rb") as file:
        begin, header = _header(file, path)
        metadata = header.pop("__metadata__", None) or {}
        check_names(header)
        tensors = {name: _info(name, entry) for name, entry in header.items()}
        if not tensors:
            raise CheckpointError("it holds no tensors")
        mapping = map_file(file.fileno())
    offsets = {name: begin + entry["data_offsets"][0] for name, entry in header.items()}
    places = {name: (path, offset) for name, offset in offsets.items()}
    return Checkpoint(
        short_path(path),
        path,
        tensors,
        metadata,
        lambda name: mapped(mapping, tensors[name], offsets[name]),
        places=places,
    )


def _header(file: BinaryIO, path: Path) -> tuple[int, dict[str, Any]]:
    """Where the values begin, and the header. The library has checked that every entry is complete, that its shape
    and dtype take the bytes between its offsets, and that the values fill the file without hole or overlap."""
    size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER and size >= 8:
        raise CheckpointError(
            f"its header has {length} bytes, and at most {MAX_HEADER} are read. Download it again, or save it without"
            " its metadata."
        )
    if size < 8 + max(length, 2):
        raise CheckpointError(
            f"truncated: its header needs {8 + max(length, 2)} bytes, the file has {size}. Download it again."
        )
    text = file.read(length)
    claimed = text.count(b'"data_offsets"')
    if claimed > MAX_TENSORS:
        raise CheckpointError(f"it holds {claimed} tensors, and at most {MAX_TENSORS} are read")
    try:
        with safe_open(path, framework="np"):
            pass
        return 8 + length, json.loads(text)
    except (SafetensorError, ValueError, RecursionError) as fault:  # the last two from fields the library ignores
        raise CheckpointError(f"truncated or damaged. Download it again. ({str(fault)[:300]})") from None


def _info(name: str, entry: dict[str, Any]) -> TensorInfo:
    kind, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if kind not in DTYPES:
        raise CheckpointError(
            f"tensor {name[:120]} has the dtype {kind}, which this version cannot read; it reads {', '.join(DTYPES)}"
        )
    # The strides of an empty tensor must fit into 64 bits too.
    if len(shape) > MAX_DIMENSIONS or math.prod(max(n, 1) for n in shape) * DTYPES[kind].itemsize >= 2**63:
        raise CheckpointError(f"tensor {name[:120]} has a shape that is too large for any memory")
    return TensorInfo(tuple(shape), DTYPES[kind], end - begin)


def map_file(fileno: int) -> mmap.mmap:
    """The whole file, copy-on-write."""
    if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
        # Private and writable, so that torch takes it without a warning. Without NORESERVE (which Python's mmap
        # module names only since 3.13) Linux refuses to map a file larger than memory, although nothing is ever
        # written.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return mmap.mmap(fileno, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(fileno, 0, access=mmap.ACCESS_COPY)


def mapped(mapping: mmap.mmap, info: TensorInfo, offset: int) -> Tensor:
    """The plain tensor whose bytes begin at `offset`, in the memory of the mapping."""
    if not info.nbytes:
        return torch.empty(info.shape, dtype=info.dtype)
    if offset % info.dtype.itemsize:
        # Formats do not promise alignment, kernels need it: this one tensor is copied.
        copy = bytearray(memoryview(mapping)[offset : offset + info.nbytes])
        return torch.frombuffer(copy, dtype=info.dtype).reshape(info.shape)
    count = info.nbytes // info.dtype.itemsize
    return torch.frombuffer(mapping, dtype=info.dtype, count=count, offset=offset).reshape(info.shape)


def safetensors_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """What a safetensors file begins with, and where each tensor's bytes begin in the file, in their order. KeyError
    for a dtype that the format does not have."""
    codes = {dtype: code for code, dtype in reversed(DTYPES.items())}  # several codes are bytes to torch
    # Widest dtype first keeps every tensor aligned to its own size.
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begins, end = {}, 0
    for name in order:
        tensor = tensors[name]
        begins[name], end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + begin for name, begin in begins.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor: a view of a tensor on the CPU, a copy of one on a GPU."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return memoryview(flat.numpy())  # pyright: ignore[reportArgumentType]


def safetensors_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[memoryview]:
    """The bytes of a safetensors file, the header first, then tensor by tensor; one on a GPU is copied when its turn
    comes. KeyError for a dtype that the format does not have."""
    head, begins = safetensors_header(tensors, metadata)
    yield memoryview(head)
    for name in begins:
        if tensors[name].numel():
            yield bytes_of(tensors[name])

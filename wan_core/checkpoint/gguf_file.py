"""Reader of GGUF files. It checks every byte of the header before anything is allocated or mapped.

The format, little-endian: "GGUF", version (2 or 3), number of tensors, number of metadata entries; the metadata, each a
name, a type and a value; the tensors, each a name, its sizes (the fastest first), a type and an offset; padding; the
values, each at a multiple of `general.alignment`. Tests compare with the `gguf` package. It is not used here, because
it creates objects for every token of a tokenizer (UMT5's: 9 s and 640 MB, here 0.1 s), and allocates as much memory as
a damaged header asks for.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import json
import math
import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from wan_core.checkpoint import gguf_tokenizer
from wan_core.checkpoint.opened import (
    Checkpoint,
    CheckpointError,
    TensorInfo,
    check_names,
    listing,
    part_name,
    short_path,
)
from wan_core.checkpoint.safetensors_file import MAX_DIMENSIONS, map_file, mapped
from wan_core.config.limits import MAX_HEADER, MAX_TENSORS
from wan_core.ops.kernels.gguf_blocks import FORMATS

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_METADATA = 65_536
MAX_TEXTS = 2**19  # in all lists together: a tokenizer has a quarter of a million pieces
ARRAY, STRING, BOOL = 9, 8, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}
PLAIN = {
    0: torch.float32,
    1: torch.float16,
    24: torch.int8,
    25: torch.int16,
    26: torch.int32,
    27: torch.int64,
    28: torch.float64,
    30: torch.bfloat16,
}
PACKED = {fmt.code: fmt for fmt in FORMATS.values()}
# Other types of ggml. They are too coarse for a video model (1 to 3 bits), or not in use.
OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
_SHAPE = "comfy.gguf.orig_shape."


@dataclass(frozen=True)
class Array:
    """A metadata value that is a list: type, count and file offset of its items, which `Cursor.items` reads."""

    kind: int
    count: int
    offset: int


@dataclass
class Cursor:
    """A position in the header. Raises CheckpointError if a read goes beyond the end of the file."""

    data: mmap.mmap
    at: int = 0
    texts: int = 0  # in lists so far

    def fault(self, text: str) -> CheckpointError:
        return CheckpointError(f"damaged header ({text}). Download it again.")

    def skip(self, count: int) -> int:
        """Advance by `count` bytes; returns the offset of the first."""
        begin, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise CheckpointError(
                f"truncated: its header goes beyond the {len(self.data)} bytes of the file. Download it again."
            )
        if self.at > MAX_HEADER:
            raise self.fault(f"it has more than {MAX_HEADER} bytes")
        return begin

    def number(self, code: str) -> int:
        size = struct.calcsize(code)
        return struct.unpack_from(f"<{code}", self.data, self.skip(size))[0]

    def string(self) -> str:
        length = self.number("Q")
        begin = self.skip(length)
        try:
            return self.data[begin : begin + length].decode("utf-8")
        except UnicodeDecodeError:
            raise self.fault("a text that is not UTF-8") from None

    def value(self) -> object:
        kind = self.number("I")
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise self.fault(f"a metadata value of the unknown type {kind}")
        items, count = self.number("I"), self.number("Q")
        if items not in SCALARS and items != STRING:
            raise self.fault(f"a list of {count} values of type {items}")
        self.texts += count if items == STRING else 0
        if self.texts > MAX_TEXTS:
            raise self.fault(f"lists of {self.texts} texts, and at most {MAX_TEXTS} are read")
        array = Array(items, count, self.at)
        if items == STRING:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:
            self.skip(count * struct.calcsize(SCALARS[items]))
        return array

    def items(self, array: Array) -> list:
        """The items of a list that `value` returned."""
        if array.kind != STRING:
            code = f"<{array.count}{SCALARS[array.kind]}"
            return list(struct.unpack_from(code, self.data, array.offset))
        reader = Cursor(self.data, array.offset)
        return [reader.string() for _ in range(array.count)]


@dataclass(frozen=True)
class Stored:
    """A tensor of the file: `code` is ggml's type number, `offset` counts from the first value."""

    name: str
    shape: tuple[int, ...]
    code: int
    offset: int
    nbytes: int = 0


def open_gguf(path: Path) -> Checkpoint:
    """Check the header and map the values, copy-on-write. Raises `CheckpointError` on any fault.

    Matrices in a block format have a `packing`; tensors stored as F32, F16 or BF16 are plain. Names are the file's. A
    text encoder's tokenizer is read from the metadata, if present.
    """
    with path.open("rb") as file:
        if file.seek(0, 2) < 24:
            raise CheckpointError("truncated: too short for a GGUF header. Download it again.")
        mapping = map_file(file.fileno())
    cursor = Cursor(mapping)
    metadata, stored = _header(cursor)
    begin = _first_value(cursor, metadata)
    tensors = {entry.name: _info(entry) for entry in _placed(stored, metadata, cursor, len(mapping) - begin)}
    blocks = {name: _blocks(name, info) for name, info in tensors.items() if info.packing is not None}
    stored_infos = {name: info for name, info in tensors.items() if name not in blocks} | dict(blocks.values())
    offsets = {blocks[e.name][0] if e.name in blocks else e.name: begin + e.offset for e in stored}

    def plain(name: str) -> Tensor:
        return mapped(mapping, stored_infos[name], offsets[name])

    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in metadata.items()
        if not isinstance(value, Array)
    }
    places = {name: (path, offset) for name, offset in offsets.items()}
    parts = {name: dict([one]) for name, one in blocks.items()}
    tokenizer = _tokenizer(cursor, metadata)
    return Checkpoint(short_path(path), path, tensors, texts, plain, tokenizer, places=places, parts=parts)


def _header(cursor: Cursor) -> tuple[dict[str, object], list[Stored]]:
    if cursor.data[:4] != MAGIC:
        raise CheckpointError("not a GGUF file")
    cursor.skip(4)
    version = cursor.number("I")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        raise CheckpointError(
            "a big-endian GGUF file, which is not supported: use the little-endian file"
            if swapped
            else f"GGUF version {version}; only versions 2 and 3 can be read: convert it again with a current program"
        )
    tensors, count = cursor.number("Q"), cursor.number("Q")
    if tensors > MAX_TENSORS or count > MAX_METADATA:
        raise cursor.fault(
            f"it claims {tensors} tensors and {count} metadata entries, and at most {MAX_TENSORS} and {MAX_METADATA}"
            " are read"
        )
    metadata: dict[str, object] = {}
    for _ in range(count):
        name = cursor.string()
        if name in metadata:
            raise cursor.fault(f"the metadata entry {name[:120]} appears twice")
        metadata[name] = cursor.value()
    return metadata, [_tensor(cursor) for _ in range(tensors)]


def _tensor(cursor: Cursor) -> Stored:
    name, axes = cursor.string(), cursor.number("I")
    if axes > MAX_DIMENSIONS:
        raise cursor.fault(f"tensor {name[:120]} has {axes} axes")
    shape = tuple(reversed([cursor.number("Q") for _ in range(axes)]))
    return Stored(name, shape, cursor.number("I"), cursor.number("Q"))


def _first_value(cursor: Cursor, metadata: dict[str, object]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or isinstance(alignment, bool) or not 0 < alignment <= 2**20:
        raise cursor.fault(f"an alignment of {str(alignment)[:40]}")
    if alignment & (alignment - 1):
        raise cursor.fault(f"an alignment of {alignment}, which is not a power of two")
    return -(-cursor.at // alignment) * alignment


def _placed(stored: list[Stored], metadata: dict[str, object], cursor: Cursor, available: int) -> list[Stored]:
    """The tensors with sizes in bytes and original shapes, each checked to lie inside the file and overlap no other."""
    unknown = sorted(
        {OTHERS.get(e.code, f"number {e.code}") for e in stored if e.code not in PLAIN and e.code not in PACKED}
    )
    if unknown:
        raise CheckpointError(
            f"it contains tensors of the type {listing(unknown)}, which is not supported. Supported are F32, F16, "
            f"BF16, {', '.join(FORMATS)}: use a file of one of these types."
        )
    entries = [_sized(entry, metadata, cursor) for entry in stored]
    if not entries:
        raise CheckpointError("a GGUF file without tensors. Download it again.")
    check_names({entry.name for entry in entries})
    if len({entry.name for entry in entries}) < len(entries):
        raise cursor.fault("a tensor's name appears twice")
    end = 0
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset < end:
            raise cursor.fault(f"tensor {entry.name[:120]} overlaps the tensor before it")
        end = entry.offset + entry.nbytes
    if end > available:
        raise CheckpointError(
            f"truncated: the header promises {end} bytes of values, the file has {max(available, 0)}. "
            "Download it again."
        )
    return entries


def _sized(entry: Stored, metadata: dict[str, object], cursor: Cursor) -> Stored:
    count = math.prod(entry.shape)
    if math.prod(max(n, 1) for n in entry.shape) >= 2**60:
        raise cursor.fault(f"tensor {entry.name[:120]} has the shape {list(entry.shape)}, too large for any memory")
    if entry.code in PACKED:
        fmt = PACKED[entry.code]
        if not entry.shape or entry.shape[-1] % fmt.numbers or not count:
            raise cursor.fault(
                f"tensor {entry.name[:120]} is {fmt.name} {list(entry.shape)}, and its rows must be multiples of "
                f"{fmt.numbers}"
            )
        nbytes = count // fmt.numbers * fmt.bytes
    else:
        nbytes = count * PLAIN[entry.code].itemsize
    return replace(entry, shape=_restored(entry, metadata, cursor), nbytes=nbytes)


# ggml leaves out leading axes of one: a block's modulation is [1, 6, C], the head's [1, 2, C].
_MODULATION = re.compile(r"(.*\.)?modulation")


def _restored(entry: Stored, metadata: dict[str, object], cursor: Cursor) -> tuple[int, ...]:
    """The shape before ggml's limit of four axes, from the metadata if it is there."""
    original = metadata.get(_SHAPE + entry.name)
    if original is None:
        lost = len(entry.shape) == 2 and _MODULATION.fullmatch(entry.name)
        return (1, *entry.shape) if lost else entry.shape
    if not isinstance(original, Array) or original.kind not in (4, 5, 10, 11) or original.count > MAX_DIMENSIONS:
        raise cursor.fault(f"the original shape of {entry.name[:120]} is not a list of sizes")
    shape = tuple(cursor.items(original))
    if any(n < 0 for n in shape) or math.prod(shape) != math.prod(entry.shape):
        raise cursor.fault(f"tensor {entry.name[:120]} is {list(entry.shape)}, but its metadata says {list(shape)}")
    if entry.code in PACKED and shape[-1] != entry.shape[-1]:
        raise cursor.fault(f"tensor {entry.name[:120]} is packed in rows of {entry.shape[-1]}, not of {shape[-1]}")
    return shape


def _info(entry: Stored) -> TensorInfo:
    packed = PACKED.get(entry.code)
    if packed is not None:
        return TensorInfo(entry.shape, torch.float32, entry.nbytes, packed.name)
    return TensorInfo(entry.shape, PLAIN[entry.code], entry.nbytes)


def _blocks(name: str, info: TensorInfo) -> tuple[str, TensorInfo]:
    """The only part of a packed matrix: the bytes of its blocks, row by row."""
    assert info.packing is not None
    row = info.shape[-1] // FORMATS[info.packing].numbers * FORMATS[info.packing].bytes
    return part_name(name, "weight"), TensorInfo((info.nbytes // row, row), torch.uint8, info.nbytes)


def _tokenizer(cursor: Cursor, metadata: dict[str, object]) -> Callable[[], bytes] | None:
    """A function that builds the SentencePiece model of the metadata; None if the metadata has none."""
    if metadata.get("tokenizer.ggml.model") != "t5":
        return None

    def listed(name: str) -> list:
        value = metadata.get(f"tokenizer.ggml.{name}")
        return cursor.items(value) if isinstance(value, Array) else []

    def plain(name: str) -> object:
        return metadata.get(f"tokenizer.ggml.{name}")

    return lambda: gguf_tokenizer.proto(
        pieces=listed("tokens"),
        scores=listed("scores"),
        kinds=listed("token_type"),
        charsmap=listed("precompiled_charsmap"),
        ids={name: plain(f"{key}_token_id") for name, key in gguf_tokenizer.ID_KEYS.items()},
        add_prefix=plain("add_space_prefix"),
        remove_spaces=plain("remove_extra_whitespaces"),
    )

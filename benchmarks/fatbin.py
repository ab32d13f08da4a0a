"""Device code of libraries: blanked for GPUs that are not there, it packs to nothing.

CUDA's section `.nv_fatbin` of an ELF file holds containers, each a header (magic, version, its size, the size of its
body) and entries: kind (1 PTX, 2 machine code), size of its header, size of its payload, and at byte 28 the compute
capability. The driver looks at entries for its own GPU alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

SECTION, CONTAINER, MACHINE_CODE = b".nv_fatbin", 0xBA55ED50, 2


def blank_other_gpus(path: Path, arch: int) -> None:
    """Zero what an ELF file has for other compute capabilities than `arch` (90 for Hopper), in place."""
    data = bytearray(path.read_bytes())
    if data[:4] != b"\x7fELF":
        return
    for start, end in sections(data):
        for begin, length, kind, target in entries(data, start, end):
            if target and not (kind == MACHINE_CODE and target == arch):
                data[begin : begin + length] = bytes(length)
    path.write_bytes(data)


def sections(data: bytearray) -> Iterator[tuple[int, int]]:
    """Begin and end of each section with device code, in a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    found = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    texts = found[names][4] if found else 0
    for name, _, _, _, start, length in found:
        if bytes(data[texts + name : data.index(0, texts + name)]) == SECTION:
            yield start, start + length


def entries(data: bytearray, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(begin, length, kind, compute capability) of the payloads between two offsets."""
    at = start
    while at < end - 16:
        if struct.unpack_from("<I", data, at)[0] != CONTAINER:
            at += 8
            continue
        (header,) = struct.unpack_from("<H", data, at + 6)
        (body,) = struct.unpack_from("<Q", data, at + 8)
        entry, last = at + header, at + header + body
        while entry < last:
            kind, _, head, payload = struct.unpack_from("<HHIQ", data, entry)
            (target,) = struct.unpack_from("<I", data, entry + 28)
            yield entry + head, payload, kind, target
            entry += head + payload
        at = last

"""A PNG writer: pictures of a run where no imaging library is installed."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from torch import Tensor


def write_png(path: Path, image: Tensor) -> None:
    """image: uint8 [rows, columns, 3] on the CPU."""
    height, width, _ = image.shape
    # Every row begins with its filter: 0, none.
    raw = b"".join(b"\0" + row.contiguous().numpy().tobytes() for row in image)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    body = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)

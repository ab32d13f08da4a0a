"""Writing GGUF files to measure with: two formats encoded by torch, on whatever device the weights are, and the file.

The encoders round each number to the nearest in a block whose range they take as it is. Converters search for better
scales, so errors of their files are smaller.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from wan_core.ops.kernels.gguf_blocks import FORMATS

ALIGNMENT = 32
F32, STRING = 0, 8


def encode_q8_0(x: Tensor) -> Tensor:
    """x [N, K], K a multiple of 32 -> uint8 [N, row bytes]."""
    blocks = x.float().reshape(-1, 32)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
    q = (blocks / _divisor(scale.float())).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((_bytes(scale), q.view(torch.uint8)), 1).view(len(x), -1)


def encode_q4_k(x: Tensor) -> Tensor:
    """x [N, K], K a multiple of 256 -> uint8 [N, row bytes]. See `gguf_blocks` for how the scales are packed."""
    blocks = x.float().reshape(-1, 8, 32)
    low = blocks.amin(-1).clamp(max=0)  # [n, 8]
    step, offset = (blocks.amax(-1) - low) / 15, -low
    scale, minimum = ((part.amax(1, keepdim=True) / 63).half() for part in (step, offset))  # [n, 1]
    scales = (step / _divisor(scale.float())).round().clamp(0, 63).to(torch.uint8)
    minima = (offset / _divisor(minimum.float())).round().clamp(0, 63).to(torch.uint8)
    step, offset = scale.float() * scales.float(), minimum.float() * minima.float()
    q = ((blocks + offset[..., None]) / _divisor(step)[..., None]).round().clamp(0, 15).to(torch.uint8)
    pairs = q.view(-1, 4, 2, 32)
    first, second = (part[:, :4] | ((part[:, 4:] >> 4) << 6) for part in (scales, minima))
    third = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    numbers = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1)
    return torch.cat((_bytes(scale), _bytes(minimum), first, second, third, numbers), 1).view(len(x), -1)


ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": encode_q8_0, "Q4_K": encode_q4_k}


def _divisor(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


def _bytes(halves: Tensor) -> Tensor:
    return halves.contiguous().view(torch.uint8)


def write_gguf(
    path: Path, tensors: Mapping[str, Tensor], packed: Mapping[str, str], notes: Mapping[str, str], arch: str = "wan"
) -> None:
    """A file of `tensors`, those named in `packed` in the format that it says, the others in F32. One tensor at a time
    is encoded, where it is, and brought to the host."""
    entries, end = [], 0
    for name, value in tensors.items():
        fmt = FORMATS.get(packed.get(name, ""))
        size = 4 * value.numel() if fmt is None else value.numel() // fmt.numbers * fmt.bytes
        code = F32 if fmt is None else fmt.code
        shape = struct.pack(f"<I{value.ndim}Q", value.ndim, *reversed(value.shape))
        entries.append(_text(name) + shape + struct.pack("<IQ", code, end))
        end += -(-size // ALIGNMENT) * ALIGNMENT
    known = {"general.architecture": arch, **notes}
    header = b"GGUF" + struct.pack("<IQQ", 3, len(entries), len(known))
    header += b"".join(_text(name) + struct.pack("<I", STRING) + _text(value) for name, value in known.items())
    header += b"".join(entries)
    with path.open("wb") as file:
        file.write(header)
        _pad(file)
        for name, value in tensors.items():
            encode = ENCODERS.get(packed.get(name, ""))
            data = value.detach().float() if encode is None else encode(value.detach())
            data.contiguous().flatten().view(torch.uint8).cpu().numpy().tofile(file)
            _pad(file)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGNMENT))

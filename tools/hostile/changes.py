"""Changes of bytes and of JSON values that make a sound file a damaged one."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random
from typing import Any

NUMBERS = (0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40,
           2**62, 2**63 - 1, 2**63, 2**64 - 1)  # fmt: skip
VALUES: tuple[Any, ...] = (
    -1, 0, 1, 2, 8, 2**31, 2**40, 2**62, 2**63 - 1, 2**64, 10**30, -(2**63), True, False, None, 1.5, -0.0, 1e300, "",
    "8", "x" * 300, "a\nb\x1b[31m", "\ud800", "\0", "../../etc/passwd", [], {}, [[]], [None] * 9, {"": 0},
)  # fmt: skip


def flipped(content: bytes, where: list[tuple[float, int]], begin: int, end: int) -> bytes:
    """`content` with some bytes between `begin` and `end` changed: (place from 0 to 1, bits to flip)."""
    changed = bytearray(content)
    for place, mask in where:
        changed[begin + int(place * (end - begin))] ^= mask
    return bytes(changed)


def _place(random: Random, content: bytes) -> int:
    """Somewhere; more often near the start or the end, where the structure of most formats is."""
    size = len(content)
    reach = random.choice((32, 256, 2048, size))
    near = random.randrange(min(reach, size)) if size else 0
    return size - 1 - near if size and random.random() < 0.3 else near


def _flip(random: Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        changed[_place(random, content)] ^= random.randint(1, 255)
    return bytes(changed)


def _number(random: Random, content: bytes) -> bytes:
    order, (code, size) = random.choice("<>"), random.choice((("B", 1), ("H", 2), ("I", 4), ("Q", 8)))
    at = _place(random, content)
    return content[:at] + struct.pack(order + code, random.choice(NUMBERS) % 2 ** (8 * size)) + content[at + size :]


def _splice(random: Random, content: bytes) -> bytes:
    """With a piece left out, put in, or replaced by another; or cut off there."""
    at, source, count = _place(random, content), _place(random, content), random.choice((1, 4, 8, 64, 1000, 5000))
    piece = random.choice(
        (b"", bytes(count), b"\xff" * count, random.randbytes(count), content[source : source + count])
    )
    return content[:at] + piece + content[at + random.choice((0, len(piece), count, len(content))) :]


BYTES: tuple[Callable[[Random, bytes], bytes], ...] = (_flip, _number, _splice)


def damaged(random: Random, content: bytes) -> bytes:
    """One to three changes of the bytes."""
    for _ in range(random.choice((1, 1, 2, 3))):
        content = random.choice(BYTES)(random, content) if content else random.randbytes(20)
    return content


def edited(random: Random, value: Any, edits: int = 1) -> Any:
    """A JSON value with some of its parts replaced, renamed, removed or repeated."""
    for _ in range(edits):
        value = _edited(random, value)
    return value


def _edited(random: Random, value: Any) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        what = random.random()
        if what < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if what < 0.2:
            return {
                random.choice(("", "x", key + "y", key * 40, "a.b\n")) if k == key else k: v for k, v in value.items()
            }
        return {**value, key: _edited(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.8:
        at, what = random.randrange(len(value)), random.random()
        if what < 0.15:
            return value[:at] + value[at + 1 :]
        if what < 0.3:
            return value[:at] + [value[at]] * random.choice((2, 9, 500)) + value[at:]
        return [*value[:at], _edited(random, value[at]), *value[at + 1 :]]
    if isinstance(value, int) and random.random() < 0.5:
        return random.choice((value + 1, value - 1, value * 2, -value, random.choice(NUMBERS)))
    return random.choice(VALUES)

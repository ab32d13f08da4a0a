"""Builds a SentencePiece model from the metadata of a GGUF file, as llama.cpp's converter writes it for T5.

The protocol buffer is written byte by byte (a field is its number and wire type, then its value), to avoid a dependency
for one message. Source: sentencepiece_model.proto of https://github.com/google/sentencepiece.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

UNIGRAM = 1
KINDS = range(1, 7)  # normal, unknown, control, user-defined, unused, byte: the same numbers as in ggml
ID_KEYS = {"unk": "unknown", "bos": "bos", "eos": "eos", "pad": "padding"}
_ID_FIELDS = {"unk": 40, "bos": 41, "eos": 42, "pad": 43}
_DEFAULT_IDS = {"unk": 2, "bos": -1, "eos": 1, "pad": 0}  # of T5


def proto(
    *,
    pieces: list,
    scores: list,
    kinds: list,
    charsmap: list,
    ids: Mapping[str, object],
    add_prefix: object = None,
    remove_spaces: object = None,
) -> bytes:
    """The serialised model. Raises ValueError if the metadata is not a valid model."""
    if not pieces or not len(pieces) == len(scores) == len(kinds):
        raise ValueError(f"its metadata has {len(pieces)} pieces, {len(scores)} scores and {len(kinds)} kinds")
    valid = all(isinstance(piece, str) for piece in pieces)
    valid = valid and all(isinstance(score, float) and abs(score) < 1e30 for score in scores)
    if not valid or not all(isinstance(kind, int) and kind in KINDS for kind in kinds):
        raise ValueError("its metadata does not list pieces with scores and kinds")
    if not all(isinstance(value, int) for value in charsmap):
        raise ValueError("its metadata has a table of characters that is not a list of bytes")
    out = bytearray()
    for piece, score, kind in zip(pieces, scores, kinds, strict=True):
        text = piece.encode()
        body = _bytes(1, text) + b"\x15" + struct.pack("<f", score) + _number(3, kind)
        out += _bytes(1, body)
    trainer = _number(3, UNIGRAM) + _number(4, len(pieces)) + _number(35, int(6 in kinds))
    for name, at in _ID_FIELDS.items():
        number = ids.get(name)
        in_range = isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(pieces)
        trainer += _number(at, number if in_range else _DEFAULT_IDS[name])  # type: ignore[arg-type]
    out += _bytes(2, trainer)
    normalizer = _bytes(2, bytes(value & 255 for value in charsmap)) if charsmap else b""
    normalizer += _number(3, int(add_prefix is not False)) + _number(4, int(remove_spaces is not False))
    return bytes(out + _bytes(3, normalizer + _number(5, 1)))


def _varint(value: int) -> bytes:
    value &= 2**64 - 1  # negative numbers as two's complement
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(at: int, value: int) -> bytes:
    return _varint(at << 3) + _varint(value)


def _bytes(at: int, value: bytes) -> bytes:
    return _varint(at << 3 | 2) + _varint(len(value)) + value

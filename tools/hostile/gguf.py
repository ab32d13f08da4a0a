"""Sound and hostile GGUF files."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import cache
from random import Random
from typing import Any

from tools.hostile.changes import NUMBERS, damaged
from tools.hostile.checkpoints import DESCRIBED, MODULES, grown_names, weights

TEXT_TYPE, ARRAY_TYPE = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def gguf(metadata: Mapping[str, tuple[int, Any]], tensors: Mapping[str, tuple[tuple[int, ...], int, bytes]]) -> bytes:
    """A GGUF file. metadata: name -> (type, value), a list as (type of its items, list); tensors: name -> (shape,
    ggml's number of the type, values)."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def one(kind: int, value: Any) -> bytes:
        return text(value) if kind == TEXT_TYPE else struct.pack(f"<{SCALARS[kind]}", value)

    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for name, (kind, value) in metadata.items():
        listed = isinstance(value, list)
        out += text(name) + (struct.pack("<IIQ", ARRAY_TYPE, kind, len(value)) if listed else struct.pack("<I", kind))
        out += b"".join(one(kind, item) for item in value) if listed else one(kind, value)
    offset = 0
    for name, (shape, code, values) in tensors.items():
        out += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), code, offset)
        offset += -(-len(values) // 32) * 32
    out += bytes(-len(out) % 32)
    return bytes(out) + b"".join(values + bytes(-len(values) % 32) for _, _, values in tensors.values())


@cache
def gguf_tensors(name: str) -> dict[str, tuple[tuple[int, ...], int, bytes]]:
    """The weights of `name` in float16, and two matrices as Q8_0 (blocks of 32 numbers: 34 bytes)."""
    tensors = {n: (tuple(t.shape), 1, t.numpy().tobytes()) for n, t in weights(name).items() if n != "spiece_model"}
    return tensors | {"blocks.0.ffn.9.weight": ((2, 32), 8, bytes(68))}


@cache
def base_gguf(name: str) -> bytes:
    metadata: dict[str, tuple[int, Any]] = {
        "general.architecture": (TEXT_TYPE, "wan"),
        "num_heads": (4, 2),
        "comfy.gguf.orig_shape.patch_embedding.weight": (5, [8, 2, 1, 2, 2]),
    }
    if name == "text":
        metadata |= {
            "tokenizer.ggml.model": (TEXT_TYPE, "t5"),
            "tokenizer.ggml.tokens": (TEXT_TYPE, ["<pad>", "</s>", "<unk>", *map(chr, range(97, 110))]),
            "tokenizer.ggml.scores": (6, [0.0] * 16),
            "tokenizer.ggml.token_type": (5, [3, 3, 2] + [1] * 13),
            "tokenizer.ggml.precompiled_charsmap": (0, [1, 2, 3]),
            "tokenizer.ggml.eos_token_id": (4, 1),
        }
    tensors = dict(gguf_tensors(name))
    del tensors["blocks.0.ffn.9.weight"]
    return gguf(metadata, tensors)


GGUF_BOMBS: tuple[Callable[[], bytes], ...] = (
    lambda: gguf({}, {}),
    lambda: b"GGUF" + struct.pack("<IQQ", 3, 10**6, 0) + _gguf_entries(10**6) + bytes(64),
    lambda: b"GGUF" + struct.pack("<IQQ", 3, 20_000, 0) + _gguf_entries(20_000) + bytes(64),
    lambda: gguf({}, {"a": ((2**40, 2**40), 0, bytes(32))}),
    lambda: b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 8, 2**23) + bytes(2**26),
    lambda: b"GGUF" + struct.pack("<IQQ", 3, 1, 60_000) + b"".join(
        struct.pack("<Q5sIIQ", 5, b"%5d" % n, 9, 8, 20) + bytes(160) for n in range(60_000)),
    lambda: b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<QQ", 2**20, 0) + bytes(2**20),
    *(
        lambda word=word: gguf({}, dict.fromkeys(grown_names(word, ".weight"), ((0,), 0, b"")))
        for word in ("blk.", "encoder.block.0.", "model.diffusion_model.")
    ),
)  # fmt: skip


def _gguf_entries(count: int) -> bytes:
    return b"".join(struct.pack("<Q7sIQIQ", 7, b"%7d" % n, 1, 0, 0, 0) for n in range(count))


def gguf_file(random: Random) -> bytes:
    name = random.choice(("dit", "text"))
    content = base_gguf(name)
    if random.random() < 0.2:
        at = 4 + random.randrange(600)
        return content[:at] + struct.pack("<Q", random.choice(NUMBERS)) + content[at + 8 :]
    if random.random() < 0.2:
        tensors = dict(gguf_tensors(name))
        victim = random.choice(sorted(tensors))
        shape, code, values = tensors[victim]
        shape = tuple(random.choice((n, n, 0, 1, 32, 2**33, 2**61)) for n in shape)
        tensors[victim] = (shape, random.choice((code, 0, 2, 8, 14, 23, 30, 99)), values)
        return gguf({"general.alignment": (4, random.choice((32, 32, 0, 1, 3, 2**20, 2**31)))}, tensors)
    if random.random() < 0.1:
        text = random.choice(DESCRIBED)
        kinds = ((24, text), (0, struct.pack(f"<{len(text)}f", *text)), (0, bytes(4 * len(text))))
        code, values = random.choice(kinds)
        preferred = f"{random.choice(MODULES)}.comfy_attention.config"
        return gguf({}, {**gguf_tensors(name), preferred: ((len(text),), code, values)})
    header = content.index(b"patch_embedding.weight") if name == "dit" else len(content) // 2
    return damaged(random, content[:header]) + content[header:] if random.random() < 0.6 else damaged(random, content)

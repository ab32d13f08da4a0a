"""Sound and hostile JSON files (config.json, shard index, curve), SentencePiece models and latents."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tools.hostile.changes import damaged, edited
from tools.hostile.checkpoints import joined, split, stored, weights
from wan_core.checkpoint import open_checkpoint
from wan_core.config.durable import SEAL, UNSEALED, seal
from wan_core.pipeline.sources import TINY

# ---------------------------------------------------------------------------------------------------------------- JSON

JSON_NAMES = ("config.json", "x.index.json", "x.magcache.json")


@cache
def sound_json(name: str) -> Any:
    if name == "config.json":
        return {
            "_class_name": "WanModel",
            "num_heads": 2,
            "num_attention_heads": 2,
            "latents_mean": [0.0] * 16,
            "latents_std": [1.0] * 16,
            "architectures": ["WanModel"],
        }
    if name == "x.index.json":
        return {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(sorted(weights("dit")), "a.safetensors")}
    return json.loads((TINY / "t2v-tiny.magcache.json").read_text())


def json_file(random: Random, name: str) -> bytes:
    sound = sound_json(name)
    if random.random() < 0.25:
        return damaged(random, json.dumps(sound).encode())
    value = edited(random, sound, random.choice((1, 1, 2, 4)))
    if name == "x.index.json" and random.random() < 0.3:
        names = ("..", "", "/etc/passwd", "a\0b", "x.index.json", "é" * 300, "a.safetensors", "../a.safetensors")
        value = {"weight_map": {key: random.choice(names) for key in sorted(weights("dit"))[: random.randint(1, 9)]}}
    return json.dumps(value).encode("utf-8", "surrogatepass")


JSON_BOMBS: tuple[Callable[[], bytes], ...] = (
    lambda: b"[" * 100_000,
    lambda: b'{"a":' * 100_000,
    lambda: b"9" * 4_000_000,
    lambda: b"[" + b"[]," * 1_300_000 + b"[]]",
    lambda: b'{"weight_map": {' + b",".join(b'"%d":"%d"' % (n, n) for n in range(200_000)) + b"}}",
    lambda: b'{"weight_map": {' + b",".join(b'"%d":"a.safetensors"' % n for n in range(130_000)) + b"}}",
    lambda: b" " * 300_000_000,
    lambda: b'{"_class_name": "WanModel", "latents_mean": [' + b"0," * 1_900_000 + b"0]}",
    lambda: b"\xff\xfe" * 1000,
    lambda: b"",
)

# ----------------------------------------------------------------------------------------------------------- tokenizers


@cache
def base_tokenizer() -> bytes:
    return open_checkpoint(TINY / "text_encoder.safetensors").read("spiece_model").numpy().tobytes()


def _field(number: int, content: bytes) -> bytes:
    """A field of a protocol buffer with bytes."""
    size, out = len(content), bytes([number << 3 | 2])
    while size > 127:
        out, size = out + bytes([size & 127 | 128]), size >> 7
    return out + bytes([size]) + content


def tokenizer(random: Random) -> bytes:
    content = base_tokenizer()
    what = random.random()
    if what < 0.15:  # a table of characters that may be anything
        return content + _field(3, _field(2, random.randbytes(random.choice((1, 4, 8, 40, 5000)))) + b"\x28\x01")
    if what < 0.3:
        piece = random.choice((b"", b"\xff", b"a" * 9999, "\u2581".encode(), b"\0", random.randbytes(9)))
        kind = bytes([0x18, random.choice((0, 1, 2, 3, 4, 5, 6, 7, 99))])
        return content + _field(1, _field(1, piece) + b"\x15" + random.randbytes(4) + kind) * random.choice((1, 2, 999))
    return damaged(random, content)


TOKENIZER_BOMBS: tuple[Callable[[], bytes], ...] = (
    lambda: b"",
    lambda: bytes(2**24 + 1),
    lambda: base_tokenizer() + b"".join(_field(1, _field(1, b"%x" % n) + b"\x15\0\0\x80\xbf") for n in range(400_000)),
    lambda: base_tokenizer() + b"".join(_field(1, _field(1, b"%x" % n) + b"\x15\0\0\x80\xbf") for n in range(900_000)),
    lambda: base_tokenizer() + _field(1, _field(1, b"a" * 15_000_000) + b"\x15\0\0\x80\xbf"),
    lambda: base_tokenizer() + _field(3, _field(2, b"\xff\xff\xff\xff" + bytes(2**20))),
    lambda: base_tokenizer() + _field(1, b"") * 4_000_000,
)

# -------------------------------------------------------------------------------------------------------------- latents


def sealed(content: bytes) -> bytes:
    """The file with a correct checksum. A file without a place for a checksum is returned unchanged."""
    if f'"{SEAL}":"{UNSEALED}"'.encode() not in content.replace(b" ", b""):
        return content
    with TemporaryDirectory() as folder:
        (path := Path(folder) / "x").write_bytes(content)
        seal(path)
        return path.read_bytes()


def claimed(value: torch.Tensor, settings: str = "{}", fps: str = "8", name: str = "latents") -> bytes:
    """A file with the checksum and the metadata of finished latents, whatever its tensor holds."""
    return sealed(stored({name: value}, {SEAL: UNSEALED, "fps": fps, "settings": settings}))


@cache
def base_latents() -> bytes:
    torch.manual_seed(0)
    return claimed(torch.randn(1, 16, 2, 4, 4), json.dumps({"prompt": "a red circle", "seed": 3}))


def latents(random: Random) -> bytes:
    what = random.random()
    if what < 0.35:
        return damaged(random, base_latents())
    header, values = split(base_latents())
    header["__metadata__"][SEAL] = UNSEALED
    if what < 0.5:
        return sealed(joined(edited(random, header, random.choice((1, 2, 3))), values))
    if what < 0.7:
        texts = ("", "0", "-1", "1.5", "9" * 5000, "1e9", "{}", "[]", "null", "[" * 99999, "NaN", '{"a": 1}', "8")
        header["__metadata__"][random.choice(("fps", "settings"))] = random.choice(texts)
        return sealed(joined(header, values))
    shape = [random.choice((n, n, 0, 1, 3, 16)) for n in (1, 16, 2, 4, 4)][: random.choice((5, 5, 5, 4))]
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.float8_e4m3fn)
    value = torch.full(shape, random.choice((0.0, 1.0, 1e30, float("nan"), float("inf")))).to(random.choice(kinds))
    return claimed(value, name=random.choice(("latents", "latents", "latents", "latent", "latents.weight")))


LATENTS_BOMBS: tuple[Callable[[], bytes], ...] = (
    lambda: claimed(torch.zeros(1, 16, 1, 4096, 2049, dtype=torch.float8_e4m3fn)),
    lambda: claimed(torch.zeros(1, 1, 1, 1, 1)),
    lambda: claimed(torch.zeros(1, 16, 0, 4, 4)),
    lambda: claimed(torch.zeros(1, 16, 2, 4, 4), '{"a":"' + "x" * 5_000_000 + '"}'),
    lambda: claimed(torch.zeros(1, 16, 2, 4, 4), "[" * 200_000),
)

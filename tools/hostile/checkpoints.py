"""Sound model files of a few kilobytes, and hostile ones: safetensors, torch archives, GGUF, LoRA."""

from __future__ import annotations

import io
import json
import math
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

from tools.hostile.changes import damaged, edited
from wan_core.checkpoint.save import write_safetensors
from wan_core.models.text.umt5 import TextConfig, UMT5Encoder
from wan_core.models.vae.config import VAE_21, VAE_22
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel

NAMES = ("dit", "text", "vae 2.1", "vae 2.2")
DIT = DiTConfig(in_channels=2, out_channels=2, dim=8, ffn_dim=8, num_heads=2, num_layers=1, text_dim=4, freq_dim=4)
TEXT = TextConfig(vocab_size=16, dim=4, dim_attn=4, dim_ffn=4, num_heads=2, num_layers=1)
SMALL = {"dim_mult": (1, 1), "num_res_blocks": 1, "temporal_downsample": (True,)}
METADATA = {"num_heads": "2", "format": "pt"}


@cache
def weights(name: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    modules: dict[str, Callable[[], nn.Module]] = {
        "dit": lambda: WanModel(DIT),
        "text": lambda: UMT5Encoder(TEXT),
        "vae 2.1": lambda: VideoVAE(replace(VAE_21, encoder_dim=2, decoder_dim=2, **SMALL)),
        "vae 2.2": lambda: VideoVAE(replace(VAE_22, encoder_dim=2, decoder_dim=2, **SMALL)),
    }
    state = {n: t.detach().to(torch.float16) for n, t in modules[name]().state_dict().items()}
    return {**state, "spiece_model": torch.arange(20, dtype=torch.uint8)} if name == "text" else state


def stored(state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file."""
    with tempfile.TemporaryDirectory() as folder:
        write_safetensors(state, Path(folder) / "x", metadata)
        return (Path(folder) / "x").read_bytes()


@cache
def base(name: str) -> bytes:
    return stored(weights(name), METADATA)


@cache
def base_pickle(name: str) -> bytes:
    file = io.BytesIO()
    torch.save(weights(name), file)
    return file.getvalue()


# -------------------------------------------------------------------------------------------------------- safetensors


def split(content: bytes) -> tuple[dict, bytes]:
    """The header and the values of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def joined(header: object, values: bytes) -> bytes:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + values


HEADERS = (
    b"{" + b'"a":[' * 5000,
    b'{"a":' + b"[" * 100_000,
    b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[' + b",".join([b"9" * 18] * 20_000) + b'],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
    b'{"\xff":1}',
    b"{}",
    b"{}" + b"\0" * 50,
)


EMPTY = '"%s":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


def grown_names(word: str, end: str, count: int = 20_000, size: int = 52) -> list[str]:
    """Names as many and as long as are read, of one word over and over: for code that looks at each word of a name."""
    tails = (f"{n:05}{end}" for n in range(count))
    return [word * ((size - len(tail)) // len(word)) + tail for tail in tails]


def empty_tensors(names: Iterable[str]) -> bytes:
    """A safetensors file of tensors without values."""
    header = f"{{{','.join(map(EMPTY.__mod__, names))}}}".encode()
    return len(header).to_bytes(8, "little") + header


def with_header(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(4)


def many_tensors(count: int) -> bytes:
    return empty_tensors(map(str, range(count)))


SAFETENSORS_BOMBS: tuple[Callable[[], bytes], ...] = (
    *(lambda header=header: with_header(header) for header in HEADERS),
    lambda: many_tensors(20_000),
    lambda: many_tensors(300_000),
    lambda: many_tensors(1_900_000),  # a header of 99 MB
    lambda: with_header(b'{"__metadata__":{"a":"' + b"x" * (15 * 2**20) + b'"}}'),
    lambda: with_header(b'{"__metadata__":{' + b",".join(b'"%d":""' % n for n in range(1_200_000)) + b"}}"),
    lambda: with_header(b'{"' + b"x" * (15 * 2**20) + b'":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'),
    lambda: with_header(b'{"a":{"dtype":"F32","shape":[' + b"1," * (7 * 2**20) + b'1],"data_offsets":[0,4]}}'),
    lambda: with_header(b'{"a":' + b"[]," * (5 * 2**20) + b"[]}"),
    lambda: empty_tensors(grown_names("blocks.0.", ".weight")),
    lambda: empty_tensors(grown_names(".alpha", ".b")),
    lambda: empty_tensors(grown_names("a.", ".weight", size=256)),
)


MODULES = ("blocks.0.self_attn", "blocks.0.cross_attn", "blocks.9.self_attn", "", "x" * 300)
DESCRIBED = (
    b'{"attention":"comfy_kitchen_int8"}', b'[{"attention":"comfy_kitchen_sol","tau":1.3},{"attention":"a"}]',
    b'{"attention":"comfy_kitchen_sol","tau":NaN}', b'{"attention":null}', b'{"attention":"\\ud800\\u001b[31m\\n"}',
    b'{"attention":"' + b"x" * 4000 + b'"}', b"[" * 4096, b"{", b"[]", b"", b"\xff\xfe", b"9" * 4096, b" " * 9000,
    b'{"format":"awq_w4a16"}', b'{"format":"int8_tensorwise"}', b'{"format":"float8_e4m3fn"}', b'{"format":[1]}',
)  # fmt: skip


def described(random: Random, state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """`state` with what ComfyUI writes beside modules: which attention they prefer, how they are quantised."""
    found = dict(state)
    for _ in range(random.randint(1, 4)):
        value = torch.tensor(list(random.choice(DESCRIBED)), dtype=torch.uint8)
        if random.random() < 0.3:
            value = value.to(random.choice((torch.int8, torch.int64, torch.float32, torch.bool, torch.float8_e5m2)))
        if random.random() < 0.2:
            value = value.reshape(-1, 1)[None]
        last = random.choice(("comfy_attention.config", "comfy_attention.config", "comfy_quant", "comfy_other"))
        found[f"{prefix}{random.choice(MODULES)}.{last}"] = value
    return found


def absurd_shapes(random: Random, name: str) -> bytes:
    """A zero makes any shape take no bytes: the file is sound, and only `detect` stands before a huge module."""
    state, header, blob = weights(name), {"__metadata__": METADATA}, b""
    changed = set(random.sample(sorted(state), random.randint(1, 3)))
    for key, value in state.items():
        shape, raw = list(value.shape), value.numpy().tobytes()
        if key in changed:
            sizes = (0, 1, 2, 3, 4, 8, 16, 100, 255, 2**20, 2**31, 2**40)
            shape = [random.choice(sizes) for _ in range(random.choice((len(shape), random.randint(0, 6))))]
            count = math.prod(shape)
            raw = bytes(count * value.element_size()) if count <= 4096 else raw
        code = "U8" if value.dtype == torch.uint8 else "F16"
        header[key] = {"dtype": code, "shape": shape, "data_offsets": [len(blob), len(blob) + len(raw)]}
        blob += raw
    return joined(header, blob)


def safetensors(random: Random) -> bytes:
    name = random.choice(NAMES)
    what = random.random()
    if what < 0.3:
        return damaged(random, base(name))
    if what < 0.5:
        return absurd_shapes(random, name)
    if what < 0.55:
        return stored(described(random, weights(name)), METADATA)
    header, values = split(base(name))
    if what < 0.7:
        keys = ("num_heads", "text_len", "eps", "latents_mean", "latents_std", "relative_attention_max_distance")
        header["__metadata__"] = {**METADATA, random.choice(keys): text_value(random)}
        return joined(header, values)
    return joined(edited(random, header, random.choice((1, 1, 2, 3))), values)


def text_value(random: Random) -> str:
    """What may be in the metadata of a file: not what is expected."""
    hostile = ("0", "-1", "3", "1e999", "9" * 5000, "NaN", "[1]", "true", '"2"', "{}", "[" * 99999, "[0" * 9999, "")
    numbers = json.dumps([random.choice((0, 1e400, 10**400, -1, 1.5))] * random.choice((1, 16, 48)))
    return random.choice((*hostile, numbers, json.dumps(edited(random, {"a": [1.0, "x"]}))))


# ------------------------------------------------------------------------------------------------------ torch archives

PROGRAMS = (
    b"\x80\x02cos\nsystem\nX\x02\0\0\0lsR\x85.",
    b"\x80\x02r\xff\xff\xff\x7fN.",  # a memo index of two thousand million
    b"\x80\x02X\xff\xff\xff\x7fabc.",  # a string of two gigabytes
    b"\x80\x02\x8b\xff\xff\xff\x7f\x01.",  # an integer of two gigabytes
    b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    b"\x80\x02ctorch\nSize\nJ\xff\xff\xff\x7f\x85R.",
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.",
    b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\0\0\0itemsK\x01sb.",
    b"\x80\x02ccollections\nOrderedDict\n)RX\x05\0\0\0modelccollections\nOrderedDict\n)R}X\x05\0\0\0itemsK\x01sbs.",
    b"\x80\x02ctorch.storage\nUntypedStorage\n\x8a\x06\0\0\0\0\0\x10\x85R.",
    b"\x80\x02ctorch._utils\n_rebuild_meta_tensor_no_storage\n)R.",
    b"\x80\x02N.",
    b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
    b"",
    b"\x80\x02" + b"]" * 1_000_000 + b".",
    b"\x80\x02(" + b"K\x01" * 400_000 + b"t.",
)


def repacked(program: Callable[[bytes], bytes], name: str = "dit") -> bytes:
    """The archive of `name` with another pickle, its checksums right."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(base_pickle(name))) as old, zipfile.ZipFile(file, "w") as new:
        for member in old.infolist():
            content = old.read(member)
            new.writestr(member.filename, program(content) if member.filename.endswith("data.pkl") else content)
    return file.getvalue()


def _many_members(count: int) -> bytes:
    """An archive whose list has `count` members, all at the same place."""
    one = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    listed = one * count
    local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, 0, 0, 1, 0) + b"a"
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 20, 20, 0, 0, count, count, len(listed), len(local))
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, len(local) + len(listed), 1)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return local + listed + end64 + locator + end


PICKLE_BOMBS: tuple[Callable[[], bytes], ...] = (
    *(lambda program=program: repacked(lambda _: program) for program in PROGRAMS),
    lambda: repacked(lambda _: b"\x80\x02" + b"]" * 60_000_000 + b"."),
    lambda: _many_members(1_200_000),
)


def archive(random: Random) -> bytes:
    name, what = random.choice(NAMES), random.random()
    if what < 0.4:
        return damaged(random, base_pickle(name))
    if what < 0.5:
        content = base_pickle(name)
        listed = content.rindex(b"PK\x01\x02")
        return content[:listed] + damaged(random, content[listed:])
    return repacked(lambda program: damaged(random, program), name)

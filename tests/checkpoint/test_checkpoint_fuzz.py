"""Damaged and hostile files: the only outcomes are a `CheckpointError` that names the file, or a model that is whole.

Every example runs under a cap on address space and on time: a file of a few kilobytes can neither make us allocate nor
hang.
"""

from __future__ import annotations

import io
import json
import math
import resource
import struct
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tools.hostile.changes import flipped
from tools.hostile.checkpoints import (
    HEADERS,
    METADATA,
    NAMES,
    PROGRAMS,
    base,
    base_pickle,
    joined,
    repacked,
    split,
    weights,
    with_header,
)
from wan_core.checkpoint import CheckpointError, detect, load_dit, load_text_encoder, load_vae, open_checkpoint

SECONDS = 5.0  # for one example; the slowest takes a tenth of it on an idle core
HEADROOM = 768 * 2**20  # of address space, above what the process has already

quick = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
many = settings(quick, max_examples=20)


@pytest.fixture(scope="module", autouse=True)
def _capped() -> Iterator[None]:
    for name in NAMES:
        base(name)  # built, and torch warmed up, before the cap
        survives(base(name))
    yield from capped()


def capped() -> Iterator[None]:
    """A cap on address space until it is resumed."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + HEADROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


# --------------------------------------------------------------------------------------------------------- the property


def survives(content: bytes, name: str = "model.safetensors", others: Mapping[str, bytes] | None = None) -> str | None:
    """Open, detect and load `content`; the message of the refusal, or None where it loaded."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        for other, text in (others or {}).items():
            (Path(folder) / other).write_bytes(text)
        (Path(folder) / name).write_bytes(content)
        return outcome(Path(folder) / name)


def outcome(path: Path) -> str | None:
    begin = time.process_time()  # its own: others may keep the machine busy
    try:
        checkpoint = open_checkpoint(path)
        size = sum(file.stat().st_size for file in path.parent.iterdir())
        assert sum(info.nbytes for info in checkpoint.tensors.values()) <= size + 4096
        for tensor in checkpoint.tensors:
            value = checkpoint.read(tensor)
            assert (value.shape, value.dtype) == (checkpoint.tensors[tensor].shape, checkpoint.tensors[tensor].dtype)
        kind = detect(checkpoint).kind
        {"dit": load_dit, "text_encoder": load_text_encoder, "vae": load_vae}[kind](checkpoint)
    except CheckpointError as fault:
        message = str(fault)
        # The file, or the config or index beside it.
        assert path.parent.name in message and len(message) > len(path.name) + 10, message
        assert "alloc" not in message and "memory" not in message.replace("any memory", ""), message
        assert len(message) < 2000, message
        return message
    finally:
        assert time.process_time() - begin < SECONDS
    return None


@pytest.mark.parametrize("name", NAMES)
def test_sound_files_load(name: str) -> None:
    message = survives(base(name))
    assert message is None or "tokenizer" in message  # the text encoder's is twenty arbitrary bytes
    message = survives(base_pickle(name), "m.pth", {"config.json": b'{"_class_name": "WanModel", "num_heads": 2}'})
    assert message is None or "tokenizer" in message


# ----------------------------------------------------------------------------------------------------------- raw damage


@many
@given(name=st.sampled_from(NAMES), data=st.data())
def test_truncated(name: str, data: st.DataObject) -> None:
    for content, file in ((base(name), "model.safetensors"), (base_pickle(name), "model.pth")):
        length = data.draw(st.integers(0, len(content) - 1))
        message = survives(content[:length], file)
        assert message and ("truncated" in message or length < 10 or file == "model.pth")


flips = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=6)


@settings(quick, max_examples=26)
@given(name=st.sampled_from(NAMES), where=flips)
def test_flipped_header_bytes(name: str, where: list[tuple[float, int]]) -> None:
    content = base(name)
    survives(flipped(content, where, 0, 8 + int.from_bytes(content[:8], "little")))


@many
@given(name=st.sampled_from(NAMES), where=flips, tail=st.booleans())
def test_flipped_archive_bytes(name: str, where: list[tuple[float, int]], tail: bool) -> None:
    """Anywhere, or in the central directory, where one byte moves everything."""
    content = base_pickle(name)
    survives(flipped(content, where, content.rindex(b"PK\x01\x02") if tail else 0, len(content)), "model.pth")


@settings(quick, max_examples=16)
@given(
    start=st.sampled_from(
        [b"", b"PK\x03\x04", b"GGUF", b"\x80\x02", struct.pack("<Q", 30) + b"{", struct.pack("<Q", 2**62) + b"{"]
    ),
    content=st.binary(max_size=200),
)
def test_random_bytes(start: bytes, content: bytes) -> None:
    assert survives(start + content)


# ------------------------------------------------------------------------------------------------------- edited headers

numbers = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31, 2**40, 2**62, 2**63 - 1, 2**64, 10**30, -(2**63), True, None, 1.5, "8", [], 1e300]),
)
anything = st.recursive(
    numbers, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
)
dtypes = st.sampled_from(
    ["F32", "F16", "BF16", "U8", "I64", "F8_E4M3", "F8_E5M2", "BOOL", "F4", "C64", "", "f16", "F64"]
)


@settings(quick, max_examples=33)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_edited_header(name: str, data: st.DataObject) -> None:
    header, values = split(base(name))
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(sorted(header)))
        edit = data.draw(
            st.sampled_from(["shape", "dtype", "data_offsets", "drop", "rename", "entry", "metadata", "one size"])
        )
        entry = header[key]
        if edit == "drop":
            del header[key]
        elif edit == "rename":
            new = data.draw(
                st.text(max_size=8)
                | st.sampled_from(["blocks.9.modulation", "x.lora_A.weight", "blocks.7777.norm3.bias"])
            )
            header[new] = header.pop(key)
        elif edit == "entry":
            header[key] = data.draw(anything)
        elif edit == "metadata":
            header["__metadata__"] = data.draw(st.dictionaries(st.sampled_from(sorted(METADATA)), anything) | anything)
        elif isinstance(entry, dict) and "shape" in entry:
            if edit == "one size" and isinstance(entry["shape"], list) and entry["shape"]:
                entry["shape"][data.draw(st.integers(0, len(entry["shape"]) - 1))] = data.draw(numbers)
            elif edit == "dtype":
                entry["dtype"] = data.draw(dtypes)
            elif edit in ("shape", "data_offsets"):
                entry[edit] = data.draw(st.lists(numbers, max_size=6) | anything)
    survives(joined(header, values))


def test_duplicated_names() -> None:
    header, values = split(base("dit"))
    text = json.dumps(header)[:-1] + ', "head.modulation": ' + json.dumps(header["head.modulation"]) + "}"
    assert survives(len(text).to_bytes(8, "little") + text.encode() + values) is None  # the second wins, as in JSON


@pytest.mark.parametrize("header", HEADERS)
def test_hostile_headers(header: bytes) -> None:
    assert survives(with_header(header))


# --------------------------------------------------------------------------- files that are sound and say absurd things

sizes = st.sampled_from([0, 1, 2, 3, 4, 8, 16, 100, 255, 2**20, 2**31, 2**40])


@settings(quick, max_examples=23)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_absurd_shapes(name: str, data: st.DataObject) -> None:
    """A zero makes any shape take no bytes: the file is sound, and only `detect` stands before a huge module."""
    state = dict(weights(name))
    header, blob, end = {"__metadata__": METADATA}, b"", 0
    changed = data.draw(st.lists(st.sampled_from(sorted(state)), min_size=1, max_size=4, unique=True))
    for key, value in state.items():
        shape, raw = list(value.shape), value.numpy().tobytes()
        if key in changed:
            shape = data.draw(st.lists(sizes, min_size=len(shape), max_size=len(shape)) | st.lists(sizes, max_size=6))
            count = math.prod(shape)
            raw = bytes(2 * count) if count <= 4096 else raw
        code = "U8" if value.dtype == torch.uint8 else "F16"
        header[key] = {"dtype": code, "shape": shape, "data_offsets": [end, end + len(raw)]}
        blob, end = blob + raw, end + len(raw)
    survives(joined(header, blob))


@settings(quick, max_examples=20)
@given(
    name=st.sampled_from(NAMES),
    key=st.sampled_from(
        ["num_heads", "text_len", "eps", "latents_mean", "latents_std", "relative_attention_max_distance"]
    ),
    value=st.text(max_size=20)
    | st.sampled_from(["0", "-1", "3", "1e999", "NaN", "99999", "[1]", "true", "{}", '"2"'])
    | st.sampled_from(["9" * 5000, "1" + "0" * 400, "[" * 99999])
    | st.builds(lambda number, count: json.dumps([number] * count), numbers, st.sampled_from([1, 16, 48])),
)
@example(name="vae 2.1", key="latents_std", value=json.dumps([10**400] * 16))
def test_absurd_metadata(name: str, key: str, value: str) -> None:
    header, values = split(base(name))
    statistics = {"latents_mean": json.dumps([0.0] * 16), "latents_std": json.dumps([1.0] * 16)}
    header["__metadata__"] = {**METADATA, **statistics, key: value}
    survives(joined(header, values))


@settings(quick, max_examples=15)
@given(
    config=st.binary(max_size=60)
    | st.builds(lambda v: json.dumps({"_class_name": "WanModel", "num_heads": v}).encode(), anything)
)
@example(config=b'{"architectures": 5}')
@example(config=b'{"_class_name": [], "architectures": [{}]}')
def test_absurd_config_json(config: bytes) -> None:
    survives(base("dit"), others={"config.json": config})


@settings(quick, max_examples=20)
@given(
    index=st.binary(max_size=60)
    | st.builds(lambda v: json.dumps({"weight_map": v}).encode(), anything)
    | st.builds(
        lambda names: json.dumps({"weight_map": dict(zip(sorted(weights("dit")), names, strict=False))}).encode(),
        st.lists(
            st.sampled_from(
                ["a.safetensors", "b.safetensors", "..", "", "/etc/passwd", "a\0b", "x.index.json", "é" * 300]
            )
        ),
    )
)
def test_absurd_index(index: bytes) -> None:
    survives(index, "x.index.json", {"a.safetensors": base("dit")})


# ------------------------------------------------------------------------------------------------------ hostile pickles


@settings(quick, max_examples=26)
@given(at=st.floats(0, 1, exclude_max=True), new=st.binary(min_size=1, max_size=12), cut=st.integers(0, 12))
def test_spliced_pickle(at: float, new: bytes, cut: int) -> None:
    def splice(program: bytes) -> bytes:
        place = int(at * len(program))
        return program[:place] + new + program[place + cut :]

    survives(repacked(splice), "model.pth")


@pytest.mark.parametrize("program", PROGRAMS)
def test_hostile_pickles(program: bytes) -> None:
    assert survives(repacked(lambda _: program), "model.pth")


def test_a_pickle_that_claims_more_than_is_stored() -> None:
    """Sizes in the pickle are claims: the tensor must lie in the storage that the archive holds."""
    program = b""
    with zipfile.ZipFile(io.BytesIO(base_pickle("dit"))) as archive:
        program = next(archive.read(m) for m in archive.infolist() if m.filename.endswith("data.pkl"))
    # K\x08: the one-byte integer 8, the width in every shape; J: a four-byte integer.
    assert b"K\x08" in program
    for huge in (b"J\xff\xff\xff\x7f", b"\x8a\x06\0\0\0\0\0\x10"):
        for number in (b"K\x08", b"M\0\x01"):
            claims = repacked(lambda program, number=number, huge=huge: program.replace(number, huge))
            assert survives(claims, "model.pth") or number not in program

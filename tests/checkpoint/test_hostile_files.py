"""Hostile model files: the only outcomes are a `CheckpointError` that names the file, or a model that is whole.

Every example runs under a cap on address space and on time: a file of a few kilobytes can neither make us allocate nor
hang. `tools/fuzz.py` damages files of every kind at random; tests/tools/test_fuzz.py reads a sample of them.
"""

from __future__ import annotations

import io
import json
import resource
import struct
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.int8_files import stored
from tools.hostile.checkpoints import (
    HEADERS,
    NAMES,
    PROGRAMS,
    base,
    base_pickle,
    repacked,
    split,
    with_header,
)
from tools.hostile.lora import LORA_MODEL
from wan_core.checkpoint import CheckpointError, detect, load_dit, load_text_encoder, load_vae, open_checkpoint
from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.lora.read import read_lora
from wan_core.checkpoint.safetensors_file import MAX_DIMENSIONS
from wan_core.checkpoint.save import write_safetensors
from wan_core.config.limits import MAX_TENSORS

SECONDS = 5.0  # for one example; the slowest takes a tenth of it on an idle core
HEADROOM = 768 * 2**20  # of address space, above what the process has already

quick = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module", autouse=True)
def _capped() -> Iterator[None]:
    """A cap on address space, set when all that the examples use is built and torch is warm."""
    for name in NAMES:
        survives(base(name))
    for fmt in PACKED:
        packed_state(fmt)
    survives_as(packed_state("rotated 256"))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + HEADROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


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


@settings(quick, max_examples=20)
@given(name=st.sampled_from(NAMES), data=st.data())
def test_truncated(name: str, data: st.DataObject) -> None:
    for content, file in ((base(name), "model.safetensors"), (base_pickle(name), "model.pth")):
        length = data.draw(st.integers(0, len(content) - 1))
        message = survives(content[:length], file)
        assert message and ("truncated" in message or length < 10 or file == "model.pth")


def test_duplicated_names() -> None:
    header, values = split(base("dit"))
    text = json.dumps(header)[:-1] + ', "head.modulation": ' + json.dumps(header["head.modulation"]) + "}"
    assert survives(len(text).to_bytes(8, "little") + text.encode() + values) is None  # the second wins, as in JSON


@pytest.mark.parametrize("header", HEADERS)
def test_hostile_headers(header: bytes) -> None:
    assert survives(with_header(header))


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


# ------------------------------------------------------------------------------------------- NVFP4, MXFP8, INT8, 4 bits

PACKED = ("nvfp4", "mxfp8", "tensor", "rotated 256", "w4a4", "w4a8")


@cache
def packed_state(fmt: str) -> dict[str, torch.Tensor]:
    state, _, notes = stored(fmt)
    text = torch.frombuffer(bytearray(json.dumps(notes).encode()), dtype=torch.uint8)
    return {**state, "notes": text}


dtypes = st.sampled_from([torch.uint8, torch.int8, torch.float32, torch.float8_e4m3fn, torch.bfloat16, torch.int64])
sizes = st.lists(st.sampled_from([0, 1, 2, 3, 64, 128, 256]), max_size=3)
parts = st.sampled_from(
    ["weight", "weight_scale", "weight_scale_2", "weight_s_rel", "weight_s_channel", "weight_codebook", "comfy_quant"]
)


@settings(quick, max_examples=15)
@given(fmt=st.sampled_from(PACKED), data=st.data())
def test_parts_that_do_not_belong_together(fmt: str, data: st.DataObject) -> None:
    state = dict(packed_state(fmt))
    linear = data.draw(st.sampled_from(["blocks.0.ffn.0", "blocks.1.self_attn.q"]))
    for _ in range(data.draw(st.integers(1, 3))):
        part = data.draw(parts | st.just("input_scale"))
        if data.draw(st.booleans()):
            state.pop(f"{linear}.{part}", None)
        else:
            shape, dtype = data.draw(sizes), data.draw(dtypes)
            state[f"{linear}.{part}"] = torch.zeros(shape).to(dtype)
    survives_as(state)


def survives_as(state: dict[str, torch.Tensor]) -> str | None:
    notes = json.loads(bytes(state["notes"].tolist()))
    tensors = {name: tensor for name, tensor in state.items() if name != "notes"}
    with tempfile.TemporaryDirectory() as folder:
        write_safetensors(tensors, Path(folder) / "x", notes)
        return survives((Path(folder) / "x").read_bytes())


values = st.one_of(
    st.integers(-(2**70), 2**70), st.sampled_from([0, 1, 4, 16, 24, 64, 128, 256, 1024, 2**20]), st.none(),
    st.booleans(), st.text(max_size=5), st.floats(), st.lists(st.integers(), max_size=2),
)  # fmt: skip  # fmt: skip
keys = st.sampled_from(
    ["format", "convrot", "convrot_groupsize", "group_size", "linear_dtype", "full_precision_matrix_mult", "params"]
)


@settings(quick, max_examples=15)
@given(
    fmt=st.sampled_from(["int8_tensorwise", "convrot_w4a4", "asym_w4a8_int8"]),
    kind=st.sampled_from(PACKED[2:]),
    given_=st.dictionaries(keys, values | st.dictionaries(keys, values, max_size=2), max_size=3),
)
def test_descriptions_that_lie(fmt: str, kind: str, given_: dict[str, object]) -> None:
    """A description of another format, or with other parameters, than the parts of the matrix have."""
    state = dict(packed_state(kind))
    text = json.dumps({"format": fmt, **given_}).encode()
    state["blocks.1.ffn.2.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    survives_as(state)


def test_a_product_that_claims_to_be_huge_is_not_made():
    state = {
        "lora_unet_blocks_0_ffn_0.lokr_w1": torch.zeros(1, 1),
        "lora_unet_blocks_0_ffn_0.lokr_w2_a": torch.zeros(2_000_000, 1),
        "lora_unet_blocks_0_ffn_0.lokr_w2_b": torch.zeros(1, 2_000_000),
    }
    with pytest.raises(CheckpointError, match="another shape"):
        read_lora(state, expected_shapes(LORA_MODEL))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (struct.pack("<IQQ", 3, MAX_TENSORS + 1, 0), "it claims"),
        (struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"x", MAX_DIMENSIONS + 1), "axes"),
        (struct.pack("<IQQ", 9, 0, 0), "GGUF version 9"),
    ],
)
def test_a_gguf_header_beyond_the_limits_is_refused_before_its_lists_are_read(content: bytes, said: str) -> None:
    assert said in str(survives(b"GGUF" + content, "m.gguf"))

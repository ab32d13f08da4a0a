"""Damaged and hostile GGUF files, and NVFP4, MXFP8, INT8 and 4-bit files: the only outcomes are a `CheckpointError`
that names the file, or a model that is whole. Under the same caps on memory and time as other files
(`test_checkpoint_fuzz`)."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.test_checkpoint_fuzz import capped, flips, survives
from tests.gguf_files import llama_name, matrices, tokenizer_notes, write
from tests.int8_files import stored
from tools.hostile.changes import flipped
from wan_core.checkpoint import load_text_encoder
from wan_core.checkpoint.gguf_file import open_gguf
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import write_safetensors
from wan_core.models.wan.config import DiTConfig
from wan_core.pipeline.sources import TINY

quick = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
NAMES = ("dit", "text")
DIT = DiTConfig(in_channels=2, out_channels=2, dim=32, ffn_dim=32, num_heads=2, num_layers=1, text_dim=32, freq_dim=32)


@cache
def base(name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        if name == "dit":
            state = random_module(DIT, device="cpu", dtype=torch.float32).state_dict()
            notes = {"num_heads": 2, "comfy.gguf.orig_shape.patch_embedding.weight": [32, 2, 1, 2, 2]}
            write(path, state, matrices("Q4_0"), notes=notes)
        else:
            encoder = load_text_encoder(TINY / "text_encoder.safetensors", dtype=torch.float32)
            notes = tokenizer_notes(encoder.tokenizer.proto)
            write(
                path, encoder.encoder.state_dict(), lambda *_: "F16", arch="t5encoder", notes=notes, rename=llama_name
            )
        return path.read_bytes()


def header_end(content: bytes) -> int:
    """Where the values begin: nothing before is free of meaning."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        path.write_bytes(content)
        stored = sum((info.nbytes + 31) // 32 * 32 for info in open_gguf(path).tensors.values())
    return len(content) - stored


@pytest.fixture(scope="module", autouse=True)
def _capped() -> Iterator[None]:
    for name in NAMES:
        assert survives(base(name), "m.gguf") is None
    for fmt in PACKED:
        packed_state(fmt)  # torch's encoders are warm before the cap
    survives_as(packed_state("rotated 256"))
    yield from capped()


@settings(quick, max_examples=16)
@given(name=st.sampled_from(NAMES), place=st.floats(0, 1, exclude_max=True))
def test_truncated(name: str, place: float) -> None:
    content = base(name)
    message = survives(content[: int(place * (len(content) - 32))], "m.gguf")
    assert message is not None


@settings(quick, max_examples=40)
@given(name=st.sampled_from(NAMES), where=flips)
def test_flipped_header_bytes(name: str, where: list[tuple[float, int]]) -> None:
    content = base(name)
    survives(flipped(content, where, 4, header_end(content)), "m.gguf")


@settings(quick, max_examples=20)
@given(
    name=st.sampled_from(NAMES),
    field=st.integers(0, 400),
    value=st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1]),
)
def test_counts_and_lengths_that_lie(name: str, field: int, value: int) -> None:
    """An eight-byte number in the place of some eight bytes of the header."""
    content = bytearray(base(name))
    at = 8 + field * 4
    content[at : at + 8] = struct.pack("<Q", value)
    survives(bytes(content), "m.gguf")


@settings(quick, max_examples=15)
@given(version=st.integers(0, 5), counts=st.tuples(*[st.integers(0, 2**64 - 1)] * 2), content=st.binary(max_size=200))
def test_random_bytes(version: int, counts: tuple[int, int], content: bytes) -> None:
    assert survives(b"GGUF" + struct.pack("<IQQ", version, *counts) + content, "m.gguf")


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
)  # fmt: skip
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

"""Weights that stay in their mapped file: which bytes are read from where, and what a stage makes of them."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.streamed_experts import CPU, LAYERS, expert
from wan_core.checkpoint import load_dit, save
from wan_core.checkpoint.staged import Reading
from wan_core.execution.memory.file_reader import PIECE, FileReader, MappedFiles, Stretch
from wan_core.execution.memory.residency import Residency, Waits
from wan_core.execution.optimize import optimize
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.registry import resolve_attention
from wan_core.sampling.conditioning import draw_noise

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are found in /proc/self/maps")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for seed, name in enumerate(("high", "low")):
        save(expert(seed), folder / f"{name}.safetensors")
    return folder


def in_file(path: Path) -> WanModel:
    model = load_dit(path, dtype=torch.float32, how=Reading(stays=True))
    return optimize(model, attend=resolve_attention("sdpa", CPU)[1])


@settings(max_examples=15, deadline=None)
@given(
    resident=st.none() | st.integers(0, LAYERS),
    pinned=st.none() | st.integers(0, 600_000),
    calls=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=8),
)
def test_any_order_of_uses_and_prompts(files: Path, resident, pinned, calls) -> None:
    """They compute what resident weights do. pinned: bytes of weights in their file that are; None: all, and no file.
    Each call: which expert, whether a new prompt is prepared."""
    residency = Residency(CPU, "swap" if resident is None else "stream", resident_blocks=resident or 0)
    plain = {"high": expert(0), "low": expert(1)}
    for seed, name in enumerate(plain):
        if pinned is None:
            residency.add(name, expert(seed))
        else:
            residency.add(name, in_file(files / f"{name}.safetensors"), Waits(False, pinned))
    for weights in residency.host_weights.values() if pinned is not None else ():
        held = sum(unit.layout.nbytes for unit in weights.units if unit.memory is not None)
        assert held <= pinned and weights.nbytes - held - 256 * 100 < weights.bytes_in_files <= weights.nbytes - held
    x, context, texts = draw_noise(0, (1, 16, 2, 4, 6)), draw_noise(1, (1, 5, 48)), {}
    with torch.no_grad():
        for low, prompt in calls:
            name = "low" if low else "high"
            model = residency.use(name)
            assert isinstance(model, WanModel)
            if prompt or name not in texts:
                texts[name] = model.prepare_text(context), plain[name].prepare_text(context)
            ours, exact = texts[name]
            time = torch.tensor([900.0])
            assert torch.equal(model(x, time, ours), plain[name](x, time, exact))


def test_blocks_that_stream_are_pinned_before_those_that_stay(files: Path) -> None:
    one = expert(0)
    block = sum(p.nbytes for p in one.blocks[0].parameters()) * 1.1
    outside = sum(p.nbytes for p in one.parameters()) - LAYERS * block / 1.1
    residency = Residency(CPU, "stream", resident_blocks=1)
    residency.add("high", in_file(files / "high.safetensors"), Waits(False, int(outside * 1.2 + 3 * block)))
    stage = next(iter(residency.stages.values()))
    residency.use("high")
    units = residency.host_weights["high"].units
    assert {n for n, unit in enumerate(units) if unit.memory is not None} == {0, *stage.streamed}
    assert len(stage.streamed) == 3 and "stay in the file and are read" in residency.notes[0]


def test_a_tensor_is_found_in_its_file_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "two words"
    path.write_bytes(bytes(range(256)) * 64)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    flat = torch.frombuffer(mapping, dtype=torch.uint8)
    found = MappedFiles()
    assert found.find(flat) == (str(path), 0) and found.find(flat[4099:5000]) == (str(path), 4099)
    assert found.find(torch.empty(8)) is None and found.find(flat[:0]) is None
    assert found.find(torch.empty(4, device="meta")) is None
    path.rename(tmp_path / "before")
    path.write_bytes(b"another file")
    assert MappedFiles().find(flat[1:]) == (str(tmp_path / "before"), 1)  # the system follows it
    (tmp_path / "before").unlink()
    assert MappedFiles().find(flat) is None


def test_a_file_is_read_in_pieces_and_a_short_one_is_an_error(tmp_path: Path) -> None:
    path, values = tmp_path / "file", torch.randint(0, 256, (2 * PIECE + 100,), dtype=torch.uint8)
    path.write_bytes(values.numpy().tobytes())
    reader, flat = FileReader(CPU), torch.zeros(2 * PIECE + 100, dtype=torch.uint8)
    whole = Stretch(str(path), 7, 3, 2 * PIECE + 50)
    assert reader.read([whole], flat, None).queued() == [None] * 3
    assert torch.equal(flat[3 : 2 * PIECE + 53], values[7 : 2 * PIECE + 57]) and not flat[2 * PIECE + 53 :].any()
    with pytest.raises(OSError, match="the file ends at byte"):
        reader.read([Stretch(str(path), 200, 0, 2 * PIECE)], flat, None).queued()
    arrival = reader.read([whole], flat, None)
    arrival.cancel()
    assert all(piece.done() for piece in arrival.pieces)

"""Weights that stay in their mapped file: which bytes are read from where, and what a stage makes of them."""

from __future__ import annotations

import mmap
import os
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.streamed_experts import CPU, LAYERS, expert, run
from wan_core.checkpoint import load_dit, save
from wan_core.checkpoint.staged import Reading
from wan_core.execution.memory import file_reader
from wan_core.execution.memory.file_reader import PIECE, FileReader, MappedFiles, Stretch, Urgency
from wan_core.execution.memory.residency import Residency, Waits
from wan_core.execution.memory.streaming import spread
from wan_core.execution.optimize import optimize
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import ForwardInfo
from wan_core.ops.attention.registry import resolve_attention
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.plan import make_plan

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
    calls=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=8),
)
def test_any_order_of_uses_and_prompts(files: Path, resident, pinned, calls) -> None:
    """They compute what resident weights do. pinned: bytes of weights in their file that are; None: all, and no file.
    Each call: which expert, whether a new prompt is prepared, whether the other expert is said to come next."""
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
        for low, prompt, last in calls:
            name = "low" if low else "high"
            model = residency.use(name)
            assert isinstance(model, WanModel)
            if prompt or name not in texts:
                texts[name] = model.prepare_text(context), plain[name].prepare_text(context)
            ours, exact = texts[name]
            time = torch.tensor([900.0])
            assert torch.equal(model(x, time, ours, ForwardInfo(last=last)), plain[name](x, time, exact))


@pytest.mark.parametrize("pinned", range(LAYERS + 1))
def test_blocks_that_stream_are_pinned_before_those_that_stay(files: Path, pinned: int) -> None:
    """Whatever size of video comes: loading plans for one, and another has other room."""
    block = sum(p.nbytes for p in expert(0).blocks[0].parameters()) * 1.1
    residency = Residency(CPU, "stream", resident_blocks=1)
    residency.add("high", in_file(files / "high.safetensors"), Waits(False, int(pinned * block)))
    assert "stay in the file and are read" in residency.notes[0]
    for resident in range(LAYERS + 1):
        residency.follow("stream", resident, None, {})
        residency.use("high")
        streamed = set(next(iter(residency.stages.values())).streamed)
        units = residency.host_weights["high"].units
        held = {n for n, unit in enumerate(units) if n and unit.memory is not None}
        assert len(held) == pinned and (held <= streamed or streamed <= held)


@pytest.mark.parametrize("blocks", [30, 32, 40, 48])
def test_blocks_that_stream_lie_apart(blocks: int) -> None:
    """No gap between two is longer than three times their mean."""
    for resident in range(blocks - 2):
        streamed = spread(blocks, resident)
        gaps = [after - before for before, after in pairwise([*streamed, streamed[0] + blocks])]
        assert len(streamed) == blocks - resident and max(gaps) <= 3 * blocks / len(streamed)


@pytest.mark.parametrize(("resident", "share"), [(0, 0.0), (1, 0.0), (1, 0.4), (LAYERS, 0.4)])
def test_each_byte_is_read_once_a_phase_and_those_of_blocks_that_stream_once_a_forward(
    files: Path, monkeypatch: pytest.MonkeyPatch, resident: int, share: float
) -> None:
    """Also where experts hand over; and what is computed is what resident weights do."""
    residency, plan, read = Residency(CPU, "stream", resident_blocks=resident), make_plan(steps=4), FileReader.read
    for name in ("high", "low"):
        one = in_file(files / f"{name}.safetensors")
        residency.add(name, one, Waits(False, int(share * sum(p.nbytes for p in one.parameters()))))
    number = 0

    def counted(reader: FileReader, stretches, *given):
        nonlocal number
        number += sum(stretch.nbytes for stretch in stretches)
        return read(reader, stretches, *given)

    monkeypatch.setattr(FileReader, "read", counted)
    latents = run(residency.use, plan, batched=True)
    assert torch.equal(latents, run({"high": expert(0), "low": expert(1)}.__getitem__, plan, batched=True))
    stage, most = next(iter(residency.stages.values())), 0
    for phase in plan.phases:
        for unit, one in enumerate(residency.host_weights[phase[0].expert].units):
            whole, text = (sum(s.nbytes for s in one.in_file(0, n)) for n in (one.layout.nbytes, one.layout.text_bytes))
            most += text + whole * len(phase) if unit in stage.streamed else whole
        if stage.streamed:  # behind the last forward the first one comes again
            first = residency.host_weights[phase[0].expert].units[stage.streamed[0]]
            most += sum(stretch.nbytes for stretch in first.stretches)
    assert number == most


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


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 3 * PIECE // 2), st.integers(0, 9000)), min_size=1, max_size=6),
    past_cache=st.booleans(),
    refused=st.booleans(),
)
def test_stretches_are_read_together_and_past_the_cache(tmp_path_factory, lengths, past_cache, refused) -> None:
    """Whether the file system takes such reads or not. lengths: of a stretch, and of the gap behind it."""
    path, at, start, stretches = tmp_path_factory.mktemp("read") / "file", 5, 0, []
    for nbytes, gap in lengths:
        stretches.append(Stretch(str(path), at, start, nbytes))
        at, start = at + nbytes + gap, start + nbytes
    values = torch.randint(0, 256, (at,), dtype=torch.uint8)
    path.write_bytes(values.numpy().tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_reader, "available_bytes", lambda: 0 if past_cache else 1 << 50)
        if refused:
            patch.setattr(file_reader, "DIRECT", 1 << 29)
            patch.setattr(os, "open", refusing(os.open))
        flat = torch.zeros(start, dtype=torch.uint8)
        FileReader(CPU).read(stretches[::-1], flat, None).queued()
    assert torch.equal(flat, torch.cat([values[s.at : s.at + s.nbytes] for s in stretches]))
    pieces = file_reader.pieces_of(stretches)
    assert all(piece[-1].at + piece[-1].nbytes - piece[0].at // 4096 * 4096 <= PIECE for piece in pieces)


def refusing(opened):
    def open(path, flags, *more):
        if flags & 1 << 29:
            raise OSError(22, "no such reads here")
        return opened(path, flags, *more)

    return open


@pytest.mark.parametrize("changed", [False, True])
def test_the_most_urgent_is_read_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: bool) -> None:
    """changed: the next expert is in use before any is read."""
    monkeypatch.setattr(file_reader, "THREADS", 1)
    path, order, begin = tmp_path / "file", [], threading.Event()
    path.write_bytes(bytes(8))
    reader, flat = FileReader(CPU), torch.zeros(8, dtype=torch.uint8)
    reader.threads.submit(begin.wait)
    for n in range(8):
        arrival = reader.read([Stretch(str(path), n, n, 1)], flat, None, Urgency(n > 3, n % 2 > 0, n // 2))
        arrival.pieces[0].add_done_callback(lambda _, n=n: order.append(n))
    if changed:
        reader.next_is_used()
    begin.set()
    reader.threads.shutdown()
    assert order == ([0, 2, 4, 6, 1, 3, 5, 7] if changed else [0, 2, 1, 3, 4, 5, 6, 7])

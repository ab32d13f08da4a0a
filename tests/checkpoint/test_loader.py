"""Staged reading: what threads read piece by piece is what the file holds, in any order, and nothing is left behind."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wan_core.checkpoint import CheckpointError, load_dit, open_checkpoint, staged
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import write_safetensors
from wan_core.checkpoint.staged import Feed, Reading, reading
from wan_core.checkpoint.switch_interval import SHORT, SWITCH_INTERVAL
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.quant.fp8 import Fp8RowLinear
from wan_core.ops.quant.swap import Quantization

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.int64)
SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=64, ffn_dim=128, num_heads=2, num_layers=3, text_dim=48, text_len=32
)


METADATA = {"num_heads": "2", "text_len": "32"}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@settings(max_examples=15)
@given(
    shapes=st.lists(
        st.tuples(st.lists(st.integers(0, 40), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=12
    ),
    piece=st.integers(1, 300),
    ahead=st.integers(1, 5000),
    threads=st.integers(1, 5),
    data=st.data(),
)
def test_every_byte_arrives_whatever_the_pieces(tmp_path_factory, shapes, piece, ahead, threads, data):
    generator = torch.Generator().manual_seed(len(shapes))
    tensors = {}
    for i, (shape, dtype) in enumerate(shapes):
        count = int(torch.tensor(shape).prod()) * dtype.itemsize
        raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
        tensors[f"t{i}"] = raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    path = tmp_path_factory.mktemp("staged") / "a.safetensors"
    write_safetensors(tensors, path, {})
    checkpoint = open_checkpoint(path)
    order = data.draw(st.permutations(sorted(tensors)))
    asked = data.draw(st.permutations(order)) if data.draw(st.booleans()) else order  # out of order works, slower
    with (
        patch.object(staged, "PIECE", piece),
        patch.object(staged, "AHEAD", ahead),
        patch.object(staged, "SMALL", data.draw(st.sampled_from([0, 16, 4096]))),
        patch.object(staged, "READS_AT", staged.READS_AT and data.draw(st.booleans())),
        Feed(checkpoint, order, CPU, Reading(threads=threads)) as feed,
    ):
        for name in asked:
            tensor = feed.read(name)
            assert tensor.dtype == tensors[name].dtype and tensor.shape == tensors[name].shape
            assert torch.equal(bytes_of(tensor), bytes_of(tensors[name]))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-")]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("file") / "high.safetensors"
    model = random_module(SMALL, device="cpu", dtype=torch.float32)
    write_safetensors(model.state_dict(), path, METADATA)
    return path


@pytest.mark.parametrize("quantization", [None, Quantization(Fp8RowLinear, CPU)], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_a_model_is_the_same_whichever_way_it_was_read(file, dtype, quantization):
    states = []
    for how in (Reading(), Reading(mapped=False), Reading(mapped=False, threads=1)):
        with patch.object(staged, "PIECE", 1000):
            states.append(load_dit(file, dtype=dtype, quantization=quantization, how=how).state_dict())
    for other in states[1:]:
        assert set(other) == set(states[0])
        assert all(torch.equal(bytes_of(value), bytes_of(other[name])) for name, value in states[0].items())


def test_progress_counts_every_byte_and_can_stop(file):
    seen = []
    for how in (Reading(seen.append), Reading(seen.append, mapped=False)):
        seen.clear()
        load_dit(file, how=how)
        assert sum(seen) == sum(info.nbytes for info in open_checkpoint(file).tensors.values())

    class Stop(Exception):
        pass

    def stop(nbytes):
        seen.append(nbytes)
        if len(seen) == 4:
            raise Stop

    seen.clear()
    with pytest.raises(Stop):
        load_dit(file, how=Reading(stop, mapped=False))
    assert len(seen) == 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-")]


@pytest.mark.parametrize("reads_at", {staged.READS_AT, False})
def test_a_file_that_shrinks_is_an_error_of_the_file(reads_at, file, tmp_path, monkeypatch):
    monkeypatch.setattr(staged, "READS_AT", reads_at)
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(file.read_bytes())
    checkpoint = open_checkpoint(copy)
    names = list(checkpoint.tensors)
    last = max(names, key=lambda name: checkpoint.places[name][1])
    with copy.open("r+b") as short:
        short.truncate(copy.stat().st_size // 2)
    for asked, small in ((names, 0), ([last], 0), ([last], 1 << 20)):  # small ones are read, too: a mapping would die
        monkeypatch.setattr(staged, "SMALL", small)
        with pytest.raises(CheckpointError, match="become shorter"), Feed(checkpoint, asked, CPU, Reading()) as feed:
            list(map(feed.read, asked))


@pytest.mark.parametrize("where", ["_go_on", "start"])
def test_a_feed_that_cannot_begin_leaves_no_thread_behind(file, where):
    checkpoint, begin, begun = open_checkpoint(file), threading.Thread.start, []

    def start(thread):
        begun.append(thread)
        if len(begun) == 2:
            raise RuntimeError("can't start new thread")
        begin(thread)

    fails = patch.object(Feed, "_go_on", side_effect=torch.cuda.OutOfMemoryError("as a test wants it"))
    with (
        patch.object(staged, "PIECE", 1000),
        fails if where == "_go_on" else patch.object(threading.Thread, "start", start),
        pytest.raises(RuntimeError),
    ):
        Feed(checkpoint, list(checkpoint.tensors), CPU, Reading(threads=3))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-")]


def test_who_maps_and_who_reads(file):
    checkpoint = open_checkpoint(file)
    names = list(checkpoint.tensors)
    mapped = {name: checkpoint.read(name).data_ptr() for name in names}
    with reading(checkpoint, names, CPU) as read:
        assert all(read(name).data_ptr() == mapped[name] for name in names)
    with reading(checkpoint, names, CPU, Reading(mapped=False)) as read:
        assert all(read(name).data_ptr() != mapped[name] for name in names)  # also what is too small for a thread
    state = open_checkpoint(random_module(SMALL, device="cpu", dtype=torch.float32).state_dict())
    with Feed(state, list(state.tensors), CPU, Reading()) as feed:  # nothing to read from: they are there
        assert torch.equal(feed.read("head.modulation"), state.read("head.modulation"))


def test_reads_that_stop_short_go_on_where_they_stopped(file, monkeypatch):
    """A signal or a file system may end one before it is done."""
    if not staged.READS_AT:
        pytest.skip("this system has no such reads")
    whole = staged.os.preadv
    monkeypatch.setattr(staged.os, "preadv", lambda fd, views, at: whole(fd, [views[0][:1000]], at))
    checkpoint = open_checkpoint(file)
    names = list(checkpoint.tensors)
    with Feed(checkpoint, names, CPU, Reading()) as feed:
        assert all(torch.equal(feed.read(name), checkpoint.read(name)) for name in names)


class Moment:
    """An event or a stream of a GPU, as far as the order of calls goes: whoever waits has something to wait for."""

    recorded = False

    def record(self, stream):
        self.recorded = True

    def synchronize(self):
        assert self.recorded

    def wait_event(self, event):
        assert event.recorded


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("piece", [64, 1000, 1 << 20])
def test_pieces_travel_through_locked_buffers(piece, threads, file, monkeypatch):
    """The path to a GPU, with stand-ins for its streams and memory: which buffer is filled, where its bytes end up."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, pin_memory=False, **kind: empty(*size, **kind))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Moment)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: Moment())
    monkeypatch.setattr(torch.cuda, "set_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Moment())
    monkeypatch.setattr(staged, "PIECE", piece)
    monkeypatch.setattr(staged, "SMALL", 0)
    checkpoint = open_checkpoint(file)
    names = list(checkpoint.tensors)
    with Feed(checkpoint, names, torch.device("cuda"), Reading(threads=threads)) as feed:
        for name in names:
            tensor, stored = feed.read(name), checkpoint.read(name)
            assert tensor.dtype == stored.dtype and tensor.shape == stored.shape and torch.equal(tensor, stored)


def test_turns_are_short_until_the_last_context_has_ended() -> None:
    usual = sys.getswitchinterval()
    begun, end = threading.Event(), threading.Event()

    def other() -> None:
        with SWITCH_INTERVAL.short():
            begun.set()
            end.wait()

    thread = threading.Thread(target=other)
    with SWITCH_INTERVAL.short():
        thread.start()
        begun.wait()
    assert sys.getswitchinterval() == pytest.approx(SHORT)
    end.set()
    thread.join()
    assert sys.getswitchinterval() == pytest.approx(usual)

"""What is brought to a GPU ahead of the weights is bounded, and nothing is lost whatever the order."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan_core.checkpoint.lora import merge
from wan_core.checkpoint.lora.merge import Ahead, Change
from wan_core.ops.kernels.formats import FP8


@dataclass
class Factor:
    nbytes: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def record_stream(self, _):
        pass


@pytest.fixture
def moved(monkeypatch):
    names = []

    def move(ahead, batch):
        names.extend(batch)
        return {name: ahead.changes[name] for name in batch}, None

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(wait_event=lambda _: None))
    monkeypatch.setattr(Ahead, "_move", move)
    monkeypatch.setattr(merge, "AHEAD", 100)
    monkeypatch.setattr(merge, "BATCH", 1)
    return names


def changes(*sizes):
    return {f"w{i}": ((SimpleNamespace(factors=(Factor(size),)), f"w{i}"),) for i, size in enumerate(sizes)}


def test_so_many_bytes_are_ahead(moved):
    listed = changes(40, 40, 40, 300, 10)
    with Ahead(listed, SimpleNamespace(type="cuda")) as ahead:  # type: ignore[arg-type]
        most = 0
        for name in listed:
            untaken = [listed[one][0][0].factors[0].nbytes for one in ahead.moving]
            assert sum(untaken) <= 100 or len(untaken) == 1
            most = max(most, len(untaken))
            assert ahead.take(name) is listed[name]
        assert most == 2 and not ahead.moving and ahead.bytes_ahead == 0
    assert moved == list(listed)


@given(st.lists(st.integers(0, 90), max_size=30), st.integers(1, 200), st.integers(1, 200))
def test_every_change_travels_once(sizes, batch, most):
    """In batches of whatever size; the bytes ahead are bounded by what may be, one batch and one change."""
    listed = changes(*sizes)
    moved = []

    def move(ahead, names):
        moved.extend(names)
        return {name: ahead.changes[name] for name in names}, None

    with (
        patch.object(merge, "BATCH", batch),
        patch.object(merge, "AHEAD", most),
        patch.object(Ahead, "_move", move),
        patch.object(torch.cuda, "Stream", lambda _: None),
        patch.object(torch.cuda, "current_stream", lambda _: SimpleNamespace(wait_event=lambda _: None)),
        Ahead(listed, SimpleNamespace(type="cuda")) as ahead,  # type: ignore[arg-type]
    ):
        for name in listed:
            assert ahead.bytes_ahead <= max(most, batch, 96)
            assert ahead.take(name) is listed[name]
        assert not ahead.moving and not ahead.waiting and ahead.bytes_ahead == 0
    assert moved == list(listed)


@pytest.mark.parametrize("batch", [16, 400, 1 << 20])
def test_bytes_arrive_through_bounded_pinned_memory(batch, monkeypatch):
    """The path to a GPU with stand-ins for its streams and memory, for any shape, strides and dtype."""
    torch.manual_seed(0)
    factors = [
        torch.randn(5, 3).T, torch.randn(7, 3).bfloat16(), torch.randn(40, 8)[:, 2:5], torch.randn(()),
        torch.zeros(0, 4), torch.randn(9).to(FP8), torch.randn(2, 3, 1, 1).double(),
    ]  # fmt: skip
    listed = {f"w{i}": ((Change(kind="difference", shape=(), factors=(f,)), 0.5),) for i, f in enumerate(factors)}
    empty, sizes = torch.empty, []

    def pinned(size, *, pin_memory=False, **kind):
        sizes.extend([size] * pin_memory)
        return empty(size, **kind)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(merge, "BATCH", batch)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None))
    ahead = Ahead(listed, torch.device("cpu"))  # takes nothing ahead by itself
    ahead.stream = None  # type: ignore[assignment]
    for names in merge._batches(listed):
        moved, _ = ahead._move(names)
        for name in names:
            ((moved_lora, strength),) = moved[name]
            wanted = listed[name][0][0].factors[0]
            (factor,) = moved_lora.factors
            assert strength == 0.5 and factor.dtype == wanted.dtype and factor.shape == wanted.shape
            assert torch.equal(factor.double(), wanted.double())
    assert sizes and max(sizes) <= batch


def test_what_is_on_a_gpu_stays_there(moved):
    """It may still be computed there, and only the stream that computes it knows when it is done."""
    listed = changes(10, 20, 30)
    listed["w1"][0][0].factors[0].device = torch.device("cuda")
    with Ahead(listed, SimpleNamespace(type="cuda")) as ahead:  # type: ignore[arg-type]
        assert all(ahead.take(name) is listed[name] for name in listed)
    assert moved == ["w0", "w2"]

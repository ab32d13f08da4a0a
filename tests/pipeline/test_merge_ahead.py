"""What is brought to a GPU ahead of the weights is bounded, and nothing is lost whatever the order."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan_core.checkpoint import merge
from wan_core.checkpoint.merge import Ahead
from wan_core.ops.kernels.formats import FP8, Quantized


@dataclass
class Factor:
    nbytes: int

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
    """In batches of whatever size; the bytes ahead are bounded by what may be and the last batch."""
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
            assert ahead.bytes_ahead <= max(most, batch + 90)
            assert ahead.take(name) is listed[name]
        assert not ahead.moving and not ahead.waiting and ahead.bytes_ahead == 0
    assert moved == list(listed)


def test_what_comes_before_its_turn(moved):
    listed = changes(60, 60, 60, 60)
    with Ahead(listed, SimpleNamespace(type="cuda")) as ahead:  # type: ignore[arg-type]
        assert [ahead.take(name) is listed[name] for name in reversed(listed)] == [True] * 4
    assert moved == ["w0"] and not any(ahead.waiting)


def test_closed_early_nothing_is_left(moved):
    with pytest.raises(KeyboardInterrupt), Ahead(changes(60, 60), SimpleNamespace(type="cuda")) as ahead:  # type: ignore
        raise KeyboardInterrupt
    assert not ahead.moving and all(not thread.is_alive() for thread in ahead.pool._threads)


def test_changes_are_brought_in_the_order_of_the_weights(moved, monkeypatch):
    listed, seen = changes(1, 1, 1), []
    monkeypatch.setattr(merge, "Ahead", lambda wanted, device: seen.append(list(wanted)) or Ahead(wanted, device))
    device = SimpleNamespace(type="cpu")
    values = [("w2", 0), ("other", 0), ("w0", 0)]
    one = merge.Merge(listed, device).apply(values[1:2], (), ["w2", "other", "w0", "w1"])  # type: ignore[arg-type]
    assert list(one) == [("other", 0)] and seen == [["w2", "w0", "w1"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_numbers_are_dequantised_beside_what_is_stored(dtype):
    """Stored numbers may be a mapped file's, which is read again."""
    stored = Quantized(torch.ones(2, 4).to(dtype), torch.full((1,), 3.0))
    for _ in range(2):
        assert torch.equal(merge.dense(stored, torch.device("cpu")), torch.full((2, 4), 3.0))

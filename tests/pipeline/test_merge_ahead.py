"""What is brought to a GPU ahead of the weights is bounded, and nothing is lost whatever the order."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

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

    def move(_, several):
        names.append(several[0][1])
        return several, None

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(wait_event=lambda _: None))
    monkeypatch.setattr(Ahead, "_move", move)
    monkeypatch.setattr(merge, "AHEAD", 100)
    return names


def changes(*sizes):
    return {f"w{i}": ((SimpleNamespace(factors=(Factor(size),)), f"w{i}"),) for i, size in enumerate(sizes)}


def test_so_many_bytes_are_ahead(moved):
    given = changes(40, 40, 40, 300, 10)
    with Ahead(given, SimpleNamespace(type="cuda")) as ahead:  # type: ignore[arg-type]
        most = 0
        for name in given:
            untaken = [given[one][0][0].factors[0].nbytes for one in ahead.moving]
            assert sum(untaken) <= 100 or len(untaken) == 1
            most = max(most, len(untaken))
            assert ahead.take(name) is given[name]
        assert most == 2 and not ahead.moving and ahead.bytes_ahead == 0
    assert moved == list(given)


def test_what_comes_before_its_turn(moved):
    given = changes(60, 60, 60, 60)
    with Ahead(given, SimpleNamespace(type="cuda")) as ahead:  # type: ignore[arg-type]
        assert [ahead.take(name) is given[name] for name in reversed(given)] == [True] * 4
    assert moved == ["w0"]


def test_closed_early_nothing_is_left(moved):
    with pytest.raises(KeyboardInterrupt), Ahead(changes(60, 60), SimpleNamespace(type="cuda")) as ahead:  # type: ignore
        raise KeyboardInterrupt
    assert not ahead.moving and all(not thread.is_alive() for thread in ahead.pool._threads)


def test_changes_are_brought_in_the_order_of_the_weights(moved, monkeypatch):
    given, seen = changes(1, 1, 1), []
    monkeypatch.setattr(merge, "Ahead", lambda wanted, device: seen.append(list(wanted)) or Ahead(wanted, device))
    device = SimpleNamespace(type="cpu")
    values = [("w2", 0), ("other", 0), ("w0", 0)]
    one = merge.Merge(given, device).apply(values[1:2], (), ["w2", "other", "w0", "w1"])  # type: ignore[arg-type]
    assert list(one) == [("other", 0)] and seen == [["w2", "w0", "w1"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_numbers_are_dequantised_beside_what_is_stored(dtype):
    """Stored numbers may be a mapped file's, which is read again."""
    stored = Quantized(torch.ones(2, 4).to(dtype), torch.full((1,), 3.0))
    for _ in range(2):
        assert torch.equal(merge.dense(stored, torch.device("cpu")), torch.full((2, 4), 3.0))

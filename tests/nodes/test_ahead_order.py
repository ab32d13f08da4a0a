"""In which order weights are read ahead."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

SOURCE = Path(__file__).parents[2] / "nodes" / "host" / "ahead.py"
WAIT = 10.0


@pytest.fixture(scope="module")
def ahead() -> ModuleType:
    """The module alone: it needs nothing of ComfyUI."""
    spec = importlib.util.spec_from_file_location("wancore_ahead", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Reader:
    """Reads two tensors. `go`: it may begin; `seen`: what has been read, by all."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen, self.go, self.begun = name, seen, threading.Event(), threading.Event()

    def __call__(self, on_bytes: Callable[[int], None]) -> nn.Module:
        self.begun.set()
        assert self.go.wait(WAIT)
        for tensor in range(2):
            on_bytes(1)
            self.seen.append(f"{self.name} {tensor}")
        return nn.Linear(1, 1)


def test_what_is_needed_first_is_read_first(ahead: ModuleType) -> None:
    seen: list[str] = []
    names = {"low": 2, "high": 1, "text": 0}
    readers = {name: Reader(name, seen) for name in names}
    low = ahead.Ahead("low", 2, readers["low"])  # begins: nothing else is being read
    assert readers["low"].begun.wait(WAIT)
    high, text = (ahead.Ahead(name, names[name], readers[name]) for name in ("high", "text"))
    for name in ("low", "high", "text"):
        readers[name].go.set()
    assert all(one.take(lambda: None) is not None for one in (low, high, text))
    assert seen == ["text 0", "text 1", "high 0", "high 1", "low 0", "low 1"]
    assert not ahead.Ahead.unfinished


def test_what_waits_for_its_turn_can_be_dropped(ahead: ModuleType) -> None:
    seen: list[str] = []
    text, high = Reader("text", seen), Reader("high", seen)
    first = ahead.Ahead("text", 0, text)
    second = ahead.Ahead("high", 1, high)
    assert text.begun.wait(WAIT) and not high.begun.wait(0.1)
    second.drop()
    assert not high.begun.is_set() and second.module is None
    text.go.set()
    assert first.take(lambda: None) is not None and seen == ["text 0", "text 1"]

"""Work before someone waits for it: once, one after another, and a failure of it reaches nobody."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tools.declared_nodes import modules


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """`nodes.host.background` without ComfyUI."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "nodes"]:
            patch.delitem(sys.modules, name)
        for name, stub in modules().items():
            patch.setitem(sys.modules, name, stub)
        yield importlib.import_module("nodes.host.background")
        for name in [name for name in sys.modules if name.partition(".")[0] == "nodes"]:
            del sys.modules[name]


def test_each_piece_runs_once_and_never_beside_another(module: ModuleType) -> None:
    background, running, seen = module.Background(), threading.Lock(), []

    def work(name: str) -> None:
        assert running.acquire(blocking=False)
        seen.append(name)
        running.release()

    for name in ("a", "b", "a", "c", "b"):
        background.start(name, lambda name=name: work(name))
    for name in ("a", "b", "c", "never begun", None):
        background.wait(name)
    assert sorted(seen) == ["a", "b", "c"]


def test_a_failure_is_said_and_nobody_else_fails(module: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    background = module.Background()

    def work() -> None:
        raise torch.cuda.OutOfMemoryError("no memory left")

    with caplog.at_level(logging.INFO):
        background.start("kernels", work)
        background.wait("kernels")
    assert "could not prepare kernels before it is needed: no memory left" in caplog.text


def test_it_begins_when_the_server_is_up_and_only_for_a_gpu(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks: list[object] = []
    server = SimpleNamespace(app=SimpleNamespace(on_startup=hooks))
    monkeypatch.setattr(module, "PromptServer", SimpleNamespace(instance=server))
    for kind, expected in (("cpu", 0), ("cuda", 1)):
        monkeypatch.setattr(module, "device", lambda kind=kind: torch.device(kind))
        module.prepare_when_up()
        assert len(hooks) == expected
    assert not module.background.threads

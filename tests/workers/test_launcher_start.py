"""How ranks are started, and that they say that they live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from wan_core.workers import launcher, worker
from wan_core.workers.options import WorkerOptions


class Started:
    """A process that ended before it could be told anything."""

    killed = False
    stdin = property(lambda self: self)

    def write(self, _: bytes) -> None:
        raise BrokenPipeError

    def kill(self) -> None:
        self.killed = True


def test_a_start_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launcher.tempfile, "tempdir", str(tmp_path))
    seen: dict[str, str] = {}

    def popen(*_: Any, env: dict[str, str], **__: Any) -> None:
        seen.update(env)
        raise OSError("as a test wants it")

    monkeypatch.setattr(launcher.subprocess, "Popen", popen)
    with pytest.raises(OSError, match="as a test"):
        launcher._Running(WorkerOptions(devices=("cpu",)))
    assert not list(tmp_path.iterdir())
    started = Started()
    monkeypatch.setattr(launcher.subprocess, "Popen", lambda *_, **__: started)
    with pytest.raises(BrokenPipeError):
        launcher._Running(WorkerOptions(devices=("cpu",)))
    assert started.killed and not list(tmp_path.iterdir())
    assert seen["PYTHONSAFEPATH"] == "1"


class Ended(Exception):
    pass


def test_a_rank_without_memory_still_says_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran out of it says so itself. What ends the pulse is that the program is gone."""
    said: list[int] = []

    class Program:
        def send(self, header: dict[str, Any]) -> None:
            said.append(header["ranks"][0]["pulse"])
            if len(said) < 3:
                raise MemoryError
            if len(said) > 4:
                raise OSError("gone")

    def leave(code: int) -> None:
        raise Ended(code)

    own: Any = object.__new__(worker.Rank)
    own.rank, own.size, own.where, own.channel = 0, 1, {"rank": 0}, Program()
    own._status = {"phase": "denoise", "step": 1, "of": 4, "count": 2}
    monkeypatch.setattr(worker, "rendezvous", lambda *_, **__: iter([(HashStore(), 0, 1)]))
    monkeypatch.setattr(worker, "PULSE", 0)
    monkeypatch.setattr(worker.os, "_exit", leave)
    with pytest.raises(Ended, match=str(worker.ORPHAN)):
        own._pulse()
    assert said == [0, 1, 2, 3, 4]

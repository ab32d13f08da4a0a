"""How the supervisor is started, and what a start that fails leaves."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest

from wan_core.workers import processes
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
    monkeypatch.setattr(processes, "own_folder", lambda name: Path(tempfile.mkdtemp(dir=tmp_path)))
    seen: dict[str, str] = {}

    def popen(*_: Any, env: dict[str, str], **__: Any) -> None:
        seen.update(env)
        raise OSError("as a test wants it")

    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    with pytest.raises(OSError, match="as a test"):
        processes.WorkerProcesses(WorkerOptions(devices=("cpu",)))
    assert not list(tmp_path.iterdir())
    started = Started()
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: started)
    with pytest.raises(BrokenPipeError):
        processes.WorkerProcesses(WorkerOptions(devices=("cpu",)))
    assert started.killed and not list(tmp_path.iterdir())
    assert seen["PYTHONSAFEPATH"] == "1"


@pytest.mark.parametrize(
    ("value_of_host", "value_of_rank"),
    [
        ("backend:cudaMallocAsync", None),
        ("expandable_segments:True,backend:cudaMallocAsync", "expandable_segments:True"),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
    ],
)
def test_ranks_do_not_take_comfyuis_allocator(
    monkeypatch: pytest.MonkeyPatch, value_of_host: str, value_of_rank: str | None
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value_of_host)
    assert processes.rank_environment().get("PYTORCH_CUDA_ALLOC_CONF") == value_of_rank

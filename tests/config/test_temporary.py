"""Temporary folders are gone when their process has ended, whatever ended it and its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools.processes import wait_until
from wan_core.config import temporary

ROOT = Path(__file__).resolve().parents[2]
WORK = """
import sys, time
from pathlib import Path
from wan_core.config.temporary import make_named_folder, own_folder
for name in ("media", "workers"):
    (own_folder(name) / "prompt.log").write_text("a red circle")
make_named_folder(Path(sys.argv[1]))
(Path(sys.argv[1]) / "cat.png").write_text("a cat")
print("ready", flush=True)
time.sleep(float(sys.argv[2]))
"""
pytestmark = pytest.mark.skipif(os.name == "nt", reason="no shell")


def start(folder: Path, seconds: float) -> subprocess.Popen[str]:
    """A process with temporary files below `folder`. Whoever reads its output is not kept waiting by what outlives
    it."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORK, str(folder / "wancore-inputs-1"), str(seconds)],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("how", ["end", signal.SIGTERM, signal.SIGKILL, "group"])
def test_nothing_stays_of_a_process(tmp_path: Path, how: object) -> None:
    process = start(tmp_path, 0 if how == "end" else 60)
    if how != "end":
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert len(files) == 4 and all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    if how == "group":
        os.killpg(process.pid, signal.SIGKILL)
    elif isinstance(how, signal.Signals):
        process.send_signal(how)
    assert process.communicate(timeout=30)[0] == ""
    wait_until(lambda: not list(tmp_path.iterdir()), 10, "temporary files stay")


def test_the_next_process_removes_what_a_lost_machine_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of processes that have ended go, and nothing of one that runs."""
    monkeypatch.setattr(temporary.tempfile, "gettempdir", lambda: str(tmp_path))
    running = start(tmp_path, 60)
    others = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:  # as it stays where the shell ends with the process
        patch.setattr(temporary.subprocess, "run", lambda *_, **__: None)
        patch.setattr(temporary.os, "pipe", lambda: (os.open(os.devnull, os.O_RDONLY), 0))
        patch.setattr(temporary, "owner_text", lambda: "other")
        temporary.make_named_folder(tmp_path / "wancore-inputs-2")
    machine, _, run = others[0].name.removeprefix(".wancore.").partition("-")
    ended = f"{machine}-{ended_pid()}-{run.split('-')[1]}"
    (tmp_path / "wancore-inputs-2" / temporary.OWNER).write_text(ended)
    lost = tmp_path / f".wancore.{ended}-abcd.part"
    lost.mkdir()
    (lost / "prompt.log").write_text("a red circle")
    temporary._root.cache_clear()
    own = temporary.own_folder("media").parent
    temporary._root.cache_clear()
    assert sorted(tmp_path.iterdir()) == sorted([*others, own])
    running.kill()
    running.communicate()


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid

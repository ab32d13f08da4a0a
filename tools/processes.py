"""Processes as /proc shows them: which descend from which, what one holds (memory, open files, threads), and partial
files in a folder."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

PARTIAL = re.compile(r"\.(part|claim)$|^unfinished-")


@dataclass
class State:
    """What a server holds: open files by kind, and threads."""

    files: Counter[str]
    threads: int


def resident(pid: int) -> int:
    """Resident memory in bytes, of mapped files too."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def look(pid: int) -> State:
    files = Counter[str]()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue  # closed meanwhile
        files[target.partition(":")[0] if ":[" in target else target] += 1
    return State(files, len(list(Path(f"/proc/{pid}/task").iterdir())))


def hidden(base: Path) -> set[Path]:
    """Partial files and claims anywhere below a folder."""
    return {path for path in base.rglob("*") if PARTIAL.search(path.name)}


# --------------------------------------------------------------------------------------------------------- descendants


def parents() -> dict[int, int]:
    """Process -> its parent, of all that run (or are stopped; those that ended and wait to be noticed are left out)."""
    running = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue  # it ended meanwhile
            if state != "Z":
                running[int(entry.name)] = int(parent)
    return running


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def below(pid: int) -> set[int]:
    """All processes that descend from `pid`."""
    running, descendants = parents(), set[int]()
    while True:
        more = {child for child, parent in running.items() if parent in descendants | {pid}} - descendants
        if not more:
            return descendants
        descendants |= more


def ranks_below(pid: int) -> list[int]:
    """The worker processes that descend from `pid`, in the order of their numbers."""
    return sorted(child for child in below(pid) if "wan_core.workers.worker" in command_of(child))


def wait_until(true: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def wait_until_gone(pids: Collection[int], seconds: float = 20) -> None:
    """No orphan: every one of these processes has ended."""
    wait_until(lambda: not parents().keys() & set(pids), seconds, f"still there: {[command_of(p) for p in pids]}")


def open_no_more_files(pid: int) -> None:
    """From now on this process fails to open files: every free number is above its limit."""
    import resource  # not on Windows

    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = min(set(range(len(used) + 1)) - used)
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, hard))


def memory_of(pid: int) -> int:
    """Bytes that a process has allocated, without files that it maps."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

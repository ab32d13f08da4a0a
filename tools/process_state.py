"""What a process holds (memory, open files, threads, shared memory), and partial files in a folder."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass
class State:
    """What a server holds: open files by kind, and threads."""

    files: Counter[str]
    threads: int


def resident(pid: int) -> int:
    """Resident memory in bytes, of mapped files too."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def mapped_memory(pid: int) -> set[Path]:
    """Its shared memory that has a name: files in /dev/shm."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it ended meanwhile
        return set()
    return {Path(line[line.index("/dev/shm/") :]) for line in lines if "/dev/shm/" in line and "(deleted)" not in line}


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
    """Partial files and claims anywhere, and whatever is in the folder for temporary files."""
    named = [path for name in ("*.part", "*.claim", "unfinished-*") for path in base.rglob(name)]
    return {*named, *(path for path in (base / "tmp").rglob("*") if path.is_file() or path.is_socket())}

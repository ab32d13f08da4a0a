"""How much host memory is available. Imports no torch."""

from __future__ import annotations

from pathlib import Path

HOST_RESERVE = 4 * 2**30  # beside what is prepared for a run: other programs need it


def available_bytes() -> int | None:
    """Host memory that is available without swapping, to this process's container too; None where the system does not
    say."""
    free = _of_machine("MemAvailable")
    if free is None:
        return None
    below_limit = _left_in_container(Path("/sys/fs/cgroup"))
    return free if below_limit is None else min(free, below_limit)


def total_bytes() -> int | None:
    """Host memory of the machine, or of this process's container; None where the system does not say."""
    total = _of_machine("MemTotal")
    if total is None:
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def _of_machine(name: str) -> int | None:
    """Bytes that the system says of `name`."""
    try:
        with open("/proc/meminfo") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:")), None)
    except OSError:
        return None


def _left_in_container(folder: Path) -> int | None:
    """Bytes below the memory limit of a control group (version 2), cached files not counted; None where there is no
    limit."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    cached = sum(int(line.split()[1]) for line in lines if line.startswith(("active_file ", "inactive_file ")))
    return max(0, int(limit) - int(used) + cached) if limit.isdecimal() else None

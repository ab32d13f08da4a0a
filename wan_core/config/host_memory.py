"""How much host memory is available. Imports no torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

HOST_RESERVE = 4 * 2**30  # beside what is prepared for a run: other programs need it


def available_bytes(*, swap: bool = False) -> int | None:
    """Host memory that is available to this process without swapping: of the machine, of its container, and below the
    limit of its addresses (`ulimit -v`). None where the system does not say. swap: free swap space counts too."""
    free = _of_machine("MemAvailable")
    if free is None:
        return None
    free += (_of_machine("SwapFree") or 0) if swap else 0
    limits = [*map(_left_in_container, _groups()), _left_of_addresses()]
    return min([free, *(left for left in limits if left is not None)])


def total_bytes() -> int | None:
    """Host memory of the machine, or of this process's container; None where the system does not say."""
    total = _of_machine("MemTotal")
    if total is None:
        return None
    limits = [limit for folder in _groups() if (limit := _limit(folder)) is not None]
    return min([total, *limits])


def _groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[Path]:
    """Folders of the control groups that this process's memory counts in: its own, those around it, the root. Of
    version 2, or of the memory controller of version 1."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return [root]
    found = [root]
    for number, controllers, name in lines:
        if "memory" in controllers.split(",") or number == "0":
            base, inside = root / "memory" if controllers else root, Path(name.lstrip("/"))
            found += [base / part for part in (inside, *inside.parents) if base / part != root]
    return found


def _limit(folder: Path) -> int | None:
    """The memory limit of a control group; None where it has none."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError):
            limit = (folder / name).read_text().strip()
            return int(limit) if limit.isdecimal() else None
    return None


def _left_of_addresses() -> int | None:
    """Bytes of addresses that this process may still map; None where there is no limit."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return None
    return None if limit == resource.RLIM_INFINITY else max(0, limit - pages * resource.getpagesize())


def _of_machine(name: str) -> int | None:
    """Bytes that the system says of `name`."""
    try:
        with open("/proc/meminfo") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:")), None)
    except OSError:
        return None


def _left_in_container(folder: Path) -> int | None:
    """Bytes below the memory limit of a control group, cached files not counted; None where there is no limit."""
    limit, used = _limit(folder), None
    if limit is None:
        return None
    for name in ("memory.current", "memory.usage_in_bytes"):
        with suppress(OSError):
            used = int((folder / name).read_text())
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    cached = sum(int(line.split()[1]) for line in lines if line.startswith(("active_file ", "inactive_file ")))
    return None if used is None else max(0, limit - used + cached)

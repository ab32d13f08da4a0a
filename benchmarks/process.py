"""The memory of this process, as the system counts it (Linux)."""

from __future__ import annotations

from pathlib import Path


def resident_bytes() -> int:
    """What is resident now; 0 where the system does not tell."""
    return _status("VmRSS")


def reset_host_peak() -> int:
    """Begin anew, and what is resident now; 0 where the system does not let us."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return resident_bytes()


def host_peak() -> int:
    """The most that was resident since."""
    return _status("VmHWM")


def _status(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), 0)

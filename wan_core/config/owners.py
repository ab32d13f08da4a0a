"""Which process made a file, by a text in it or in its name, and whether that process still runs."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import secrets
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

_RUN = secrets.token_hex(4)  # where nothing says when a process began
OWNER = re.compile(r"[0-9a-f]{8}-\d+-[0-9a-f]{8}")
UNSIGNED_SECONDS = 60.0  # a claim without its text is one whose process ended while it wrote it, after so long


def is_left_over(claim: Path) -> bool:
    """Whether the process that `claim`, a file with `owner_text`, names has ended. Raises OSError."""
    owner = _owner_of(claim)
    if owner is None:
        return False
    return has_ended(owner) if OWNER.fullmatch(owner) else time.time() - claim.stat().st_mtime > UNSIGNED_SECONDS


def is_written_here(claim: Path) -> bool:
    """Whether another process of this host, which runs, has made the file `claim`, and it is still there."""
    owner = None
    with suppress(OSError):
        owner = _owner_of(claim)
    if owner is None or not OWNER.fullmatch(owner):
        return False
    return owner.startswith(f"{_machine()}-") and owner != owner_text() and not has_ended(owner)


def _owner_of(claim: Path) -> str | None:
    """The first line of a file; None where there is no file. A pipe that a program made would be read without end."""
    return claim.read_text(errors="replace")[:80].partition("\n")[0] if claim.is_file() else None


def owner_text() -> str:
    return f"{_machine()}-{os.getpid()}-{_run_of(os.getpid()) or _RUN}"


def _run_of(number: int) -> str | None:
    """What tells process `number` from others that have the number at other times, also before the host was started
    again: a hash of when it began. None where nothing says so, or there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        status = Path(f"/proc/{number}/stat").read_text(errors="replace")
    except OSError:
        return None
    began = status.rpartition(")")[2].split()[19]  # after the name, in clock ticks since the start of the host
    return hashlib.sha256(f"{boot} {began}".encode()).hexdigest()[:8]


@functools.cache
def _machine() -> str:
    """Where process numbers mean the same: this host, and this container on it."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return hashlib.sha256(f"{socket.gethostname()} {numbers}".encode()).hexdigest()[:8]


def has_ended(owner: str) -> bool:
    """Whether the process `owner` ran here and runs no more."""
    machine, _, rest = owner.partition("-")
    number, _, run = rest.partition("-")
    if machine != _machine() or not number.isdecimal():
        return False
    if int(number) == os.getpid():
        return owner != owner_text()
    return not _runs(int(number)) or _run_of(int(number)) not in (run, None)


def _runs(number: int) -> bool:
    if sys.platform == "win32":
        import ctypes

        kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
        kernel32.OpenProcess.restype = ctypes.c_void_p
        SYNCHRONIZE, ACCESS_DENIED, TIMEOUT = 0x100000, 5, 0x102
        handle = ctypes.c_void_p(kernel32.OpenProcess(SYNCHRONIZE, False, number))
        if not handle:
            return ctypes.get_last_error() == ACCESS_DENIED
        running = kernel32.WaitForSingleObject(handle, 0) == TIMEOUT
        kernel32.CloseHandle(handle)
        return running
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's; a number that no process has, left alone
        return True
    return True

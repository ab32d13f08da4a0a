"""This package's cache folder, in which libraries that compile (Inductor, Triton, flash-attn-4) keep their results.

These libraries look for their folders in environment variables. A variable that the user has set stays.

What is kept there is executed by the next process. So the cache folder is used only if nobody else can write to it;
otherwise results go to a private temporary folder, which this process removes at its end, and a warning says so.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from wan_core.config.checks import OptionError
from wan_core.config.temporary import own_folder

log = logging.getLogger(__name__)
INDUCTOR, FLASH_ATTENTION = "TORCHINDUCTOR_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
LIBRARY_CACHES = {INDUCTOR: "inductor", "TRITON_CACHE_DIR": "triton", FLASH_ATTENTION: "flash-attention"}
"""Environment variable -> folder in the cache folder."""
WAITS, LOOKS = 600.0, 0.05  # seconds: the longest wait for another process, between two looks whether it has ended
FLASH_ATTENTION_ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ELSEWHERE = "set WANCORE_CACHE to a folder that only you can write to."


def cache_folder() -> Path:
    """`$WANCORE_CACHE` if set, else `wancore` in the user's cache folder."""
    if folder := os.environ.get("WANCORE_CACHE"):
        return Path(folder)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "wancore"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wancore"


def why_not_private(folder: Path) -> str | None:
    """Why another user could put files into `folder`, and what to do; None if nobody else can.

    `folder` and its parents below the home folder must belong to this user, and neither group nor others may write to
    them. A parent elsewhere may belong to root, and others may write to it if only owners can rename entries (the
    sticky bit, as /tmp has it). What does not exist yet is not checked. Windows keeps its own access lists: the folder
    of a user is private there by default, and nothing is checked.
    """
    if sys.platform == "win32":
        return None
    user, resolved, home = os.geteuid(), folder.resolve(), _home()
    for place in (resolved, *resolved.parents):
        if place == home:
            break
        try:
            found = place.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as fault:
            return f"{place} cannot be examined ({fault.strerror}): {_ELSEWHERE}"
        strict = place == resolved or home in place.parents
        if found.st_uid != user and (strict or found.st_uid != 0):
            return f"{place} belongs to another user. Run `sudo chown -R $USER '{place}'`, or {_ELSEWHERE}"
        if found.st_mode & _OTHERS_WRITE and (strict or not found.st_mode & stat.S_ISVTX):
            return f"other users can write to {place}. Run `chmod go-w '{place}'`, or {_ELSEWHERE}"
    return None


def _home() -> Path | None:
    """The user's home folder; None where the system knows of none."""
    try:
        return Path.home().resolve()
    except (RuntimeError, OSError):
        return None


def make_private(folder: Path) -> None:
    """Make `folder` and its missing parents, which only this user can read or write (mode 0700). Raises OSError."""
    for place in (*reversed(folder.parents), folder):
        if not place.is_dir():
            place.mkdir(mode=0o700, exist_ok=True)


# ------------------------------------------------------------------------------------------------- compiled kernels


def set_compile_caches() -> None:
    """Set the cache folder of every compiler. Call this before the first block is compiled."""
    for variable in LIBRARY_CACHES:
        _set_folder(variable)
    set_flash_attention_cache()


def set_flash_attention_cache() -> None:
    """Set the cache folder of flash-attn-4, which compiles its kernels for seconds. It reads these variables when it is
    imported, and its import fails if it cannot make the folder."""
    _set_folder(FLASH_ATTENTION)
    try:
        make_private(Path(os.environ[FLASH_ATTENTION]))
    except OSError as fault:
        log.info("flash-attn-4 compiles its kernels in each process: %s", fault)
        return
    os.environ.setdefault(FLASH_ATTENTION_ENABLED, "1")


def why_not_kept() -> str | None:
    """Why compiled kernels are not kept for the next process, and what to do; None if they are."""
    reasons = (why_not_private(cache_folder() / name) for name in LIBRARY_CACHES.values())
    return next((reason for reason in reasons if reason is not None), None)


@contextmanager
def one_goes_first(name: str) -> Iterator[None]:
    """Around work that compiles `name`: one process of this host does it first, and those that come meanwhile wait,
    then do it together and find what was kept. Once it has ended without an exception, no later process waits.

    The system releases the lock of a process that ends, however it ends. Without locks or a folder nobody waits.
    """
    file = _opened(name)
    if file is None:
        yield
        return
    with file:
        first = _is_first(file)
        yield
        if first:
            file.write(b"done")


@contextmanager
def full_disk_explained() -> Iterator[None]:
    """Around work that compiles: raises OptionError where a disk is full, of which compilers say the system's words."""
    try:
        yield
    except (RuntimeError, OSError) as fault:
        if not any(os.strerror(number) in str(fault) for number in (errno.ENOSPC, errno.EDQUOT)):
            raise
        folders = {name: Path(os.environ[name]) for name in LIBRARY_CACHES if name in os.environ}
        folders["TMPDIR"] = Path(tempfile.gettempdir())
        free = {name: shutil.disk_usage(folder).free for name, folder in folders.items() if folder.is_dir()}
        fullest = min(free, key=free.__getitem__)
        folder = folders[fullest]
        variable = "WANCORE_CACHE" if cache_folder().resolve() in folder.resolve().parents else fullest
        raise OptionError(
            f"the disk is full: no space for compiled kernels in {folder}, {free[fullest] / 2**20:.0f} MiB are free. "
            f"Delete files there, set {variable} to a folder on another disk, or leave compile off"
        ) from fault


def _opened(name: str) -> BinaryIO | None:
    """The file whose lock is that of `name`; None where there can be none."""
    if sys.platform == "win32":
        return None
    folder = _root() / "first-use"
    try:
        make_private(folder)
        return (folder / hashlib.sha256(name.encode()).hexdigest()[:20]).open("a+b")
    except OSError as fault:
        log.info("processes that compile the same do so at the same time: %s", fault)
        return None


def _is_first(file: BinaryIO) -> bool:
    """Whether no process has ended the work of `file` or is at it; then its lock is taken. Else waits for the one that
    is, at most `WAITS`: it may be stopped in a debugger."""
    import fcntl  # not on Windows

    if os.fstat(file.fileno()).st_size:
        return False
    lock, begin = fcntl.LOCK_EX, time.monotonic()
    while time.monotonic() - begin < WAITS:
        try:
            fcntl.flock(file, lock | fcntl.LOCK_NB)
            return lock == fcntl.LOCK_EX
        except BlockingIOError:
            lock = fcntl.LOCK_SH
        except OSError as fault:  # a file system without locks
            log.info("processes that compile the same do so at the same time: %s", fault)
            return False
        time.sleep(LOOKS)
    log.info("another process compiles the same and has not ended after %.0f s", WAITS)
    return False


def _set_folder(variable: str) -> None:
    if not _is_set_by_user(variable):
        os.environ[variable] = str(_root() / LIBRARY_CACHES[variable])


def _root() -> Path:
    """The cache folder if only this user can write to it and its folders, else a temporary one."""
    folder = cache_folder().absolute()
    reason = why_not_kept()
    if reason is not None:
        return _temporary(reason)
    try:
        make_private(folder)
    except OSError as fault:
        log.info("the cache folder cannot be made: %s", fault)  # each library does without, and says so
    return folder.resolve()


@functools.cache
def _temporary(reason: str) -> Path:
    """A new folder of this process that only this user can enter."""
    log.warning("compiled kernels are not kept, because they would be executed later, and %s", reason)
    return own_folder("compiled")


def _is_set_by_user(variable: str) -> bool:
    """torch sets its own default when its compiler is imported: that does not count."""
    value = os.environ.get(variable)
    inductor = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    default = None if inductor is None or variable != INDUCTOR else inductor.default_cache_dir()
    return value is not None and value != default

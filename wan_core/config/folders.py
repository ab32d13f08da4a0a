"""The folder of this package's caches, and who may write to it."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

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

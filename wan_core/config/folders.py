"""The folder of this package's caches."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """`$WANCORE_CACHE` if set, else `wancore` in the user's cache folder."""
    if folder := os.environ.get("WANCORE_CACHE"):
        return Path(folder)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "wancore"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wancore"

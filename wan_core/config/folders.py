"""Where this package keeps what need not be made twice."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """`$WANCORE_CACHE`, else `wancore` in the user's cache folder."""
    if given := os.environ.get("WANCORE_CACHE"):
        return Path(given)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "wancore"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wancore"

"""The command that runs `wan_core` here, or a module with this Python, for messages that advise one."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def command(*words: str) -> str:
    """`wancore doctor` for the word `doctor`: what a user can type in this shell, in the current folder.

    It is what this process was started by. Elsewhere, as in ComfyUI, it names this Python and the folder of the package
    (`__main__.py`), which works in every folder and without an installation.
    """
    called = Path(sys.argv[0])
    if called.stem.lower() == "wancore":
        start = ["wancore" if shutil.which("wancore") else str(called)]
    elif called == PACKAGE / "__main__.py":  # python -m wan_core
        return module("wan_core", *words)
    else:
        start = [sys.executable, str(PACKAGE)]
    return _joined([*start, *words])


def module(name: str, *words: str) -> str:
    """`python -m pip install x` for `pip`, `install`, `x`, with the Python that runs this."""
    python = "python" if shutil.which("python") == sys.executable else sys.executable
    return _joined([python, "-m", name, *words])


def _joined(words: list[str]) -> str:
    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)

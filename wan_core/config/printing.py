"""What is printed: texts of files may hold anything, also what moves a terminal's cursor, rewrites its lines or asks it
for answers. Each such character is replaced, in every error, on the command line's output, and in log lines. Also the
commands that messages advise, as a user can type them here.
"""

from __future__ import annotations

import logging
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO, cast

REPLACED = "\N{REPLACEMENT CHARACTER}"
# Control characters but tab and line feed, and those that turn the direction of text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
OURS = ("wan_core", "wan_lab", "WanCore")  # names of loggers begin so


def plain(text: str) -> str:
    return _UNSAFE.sub(REPLACED, text)


def printable(text: str) -> str:
    return text if text.isprintable() else "".join(one if one.isprintable() else REPLACED for one in text)


class PlainStream:
    """A text stream that prints `plain` texts. A line that is rewritten begins with a carriage return."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        begin = "\r" if text.startswith("\r") else ""
        text = begin + plain(text.removeprefix(begin))
        try:
            return self.stream.write(text)
        except UnicodeEncodeError:  # half of a character, or one that this terminal does not have
            encoding = self.stream.encoding or "ascii"
            return self.stream.write(text.encode(encoding, "replace").decode(encoding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def plain_output() -> Iterator[None]:
    """All that this process prints inside is plain."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, PlainStream(stream)) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def plain_logs() -> None:
    """Make log lines of this project plain, whichever handler prints them."""
    make = logging.getLogRecordFactory()

    def record(*given: Any, **named: Any) -> logging.LogRecord:
        made = make(*given, **named)
        if made.name.partition(".")[0] in OURS:
            made.msg, made.args = plain(made.getMessage()), ()
        return made

    logging.setLogRecordFactory(record)


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

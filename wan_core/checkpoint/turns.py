"""How long a thread of this process keeps the GIL while others wait for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SHORT = 0.0002  # seconds; Python's own are 0.005


class _Turns:
    lock = threading.Lock()
    opened = 0
    usual = 0.0


@contextmanager
def short_turns() -> Iterator[None]:
    """While one of these contexts is open, threads hand the GIL over sooner: an import or a loop that launches kernels
    computes in Python for seconds, and a thread that reads a file beside it would wait 5 ms after every read."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    with _Turns.lock:
        if _Turns.opened == 0:
            _Turns.usual = sys.getswitchinterval()
        _Turns.opened += change
        sys.setswitchinterval(SHORT if _Turns.opened else _Turns.usual)

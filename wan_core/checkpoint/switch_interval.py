"""How long a thread of this process keeps the GIL while others wait for it: a setting of the whole process
(`sys.setswitchinterval`), which is shorter while files are read and kernels are prepared beside other work."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)
SHORT = 0.0002  # seconds; Python's own are 0.005


class SwitchInterval:
    """The switch interval of this process. Any number of threads may ask for a short one; the usual one returns when
    the last of them has ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users, self.usual = 0, 0.0

    @contextmanager
    def short(self) -> Iterator[None]:
        """Threads hand the GIL over sooner inside: an import or a loop that launches kernels computes in Python for
        seconds, and a thread that reads a file beside it would wait 5 ms after every read."""
        with self.lock:
            if not self.users:
                self.usual = sys.getswitchinterval()
                sys.setswitchinterval(SHORT)
                log.debug("the switch interval of this process is %g s until reading ends", SHORT)
            self.users += 1
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if not self.users:
                    sys.setswitchinterval(self.usual)


SWITCH_INTERVAL = SwitchInterval()

"""A setting of the whole process that several threads may want for a while, at times that overlap."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable


class Overlapping:
    """Holds while anyone is inside: who comes first sets it, who leaves last puts back what was there before.

    Were each to put back what it had found, one that came second would put back what the first had set, for good.
    """

    def __init__(self, change: Callable[[], Callable[[], None]]) -> None:
        """change: sets it, and returns what puts back what was there."""
        self.change, self.lock, self.inside = change, threading.Lock(), 0
        self.undo: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.undo = self.change()
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.undo()


def _stop_collecting() -> Callable[[], None]:
    undo = gc.enable if gc.isenabled() else gc.disable
    gc.disable()
    return undo


uncollected = Overlapping(_stop_collecting)
"""No garbage is looked for inside, by any thread."""

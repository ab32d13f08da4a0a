"""Items that one thread makes and another one uses at the same time: decoded frames that are encoded meanwhile.

with Feed(lambda frames: write_mp4(path, frames, fps=16)) as feed:
    for frame in decode():
        feed.put(frame)
    path = feed.finish()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Generic, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")
DEPTH = 8  # items that wait at most


class Abandoned(Exception):
    """Raised where items are taken, because their maker failed: what was made of the earlier ones is not wanted."""


class _End:
    """The last item."""


class Feed(Generic[Item, Made]):
    """Calls `consume` with an iterator in a thread of its own, while this thread puts the items into it.

    An error of `consume` is raised by the next `put`, or by `finish`. If `with` is left before `finish`, the iterator
    raises `Abandoned` in `consume`, and the thread has ended before the program goes on.
    """

    def __init__(self, consume: Callable[[Iterator[Item]], Made], depth: int = DEPTH) -> None:
        self._items: SimpleQueue[Item | _End | Abandoned] = SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._made: list[Made] = []
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(consume,), name="wancore-feed", daemon=True)

    def __enter__(self) -> Feed[Item, Made]:
        try:
            self._thread.start()  # waits for the thread, and an interruption may come meanwhile
        except BaseException:
            self.__exit__()
            raise
        return self

    def put(self, item: Item) -> None:
        """Waits while too many items wait. Raises what `consume` raised."""
        self._room.acquire()
        if self._fault is not None:
            raise self._fault
        self._items.put(item)

    def finish(self) -> Made:
        """Wait until all items are used. Returns what `consume` returned, or raises what it raised."""
        self._end(_End())
        if self._fault is not None:
            raise self._fault
        return self._made[0]

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._end(Abandoned())

    def _end(self, last: _End | Abandoned) -> None:
        self._items.put(last)
        self._thread.join()

    def _run(self, consume: Callable[[Iterator[Item]], Made]) -> None:
        try:
            self._made.append(consume(self._taken()))
        except BaseException as fault:  # noqa: BLE001, it is raised again in the other thread
            self._fault = fault
        finally:
            self._room.release()  # a thread that waits in `put` raises the fault

    def _taken(self) -> Iterator[Item]:
        while True:
            item = self._items.get()
            if isinstance(item, _End):
                return
            if isinstance(item, Abandoned):
                raise item
            self._room.release()
            yield item

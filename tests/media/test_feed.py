"""Two threads and the items between them: all arrive in order, and a fault on either side ends both."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from wan_core.media.feed import Abandoned, Feed
from wan_core.media.mp4 import write_mp4


def test_items_arrive_in_order_while_others_are_made() -> None:
    seen: list[int] = []
    with Feed(lambda items: [seen.append(item) for item in items], depth=2) as feed:
        for n in range(100):
            feed.put(n)
            assert n - len(seen) < 4  # what waits, and what is being used
        feed.finish()
    assert seen == list(range(100))


def test_a_fault_of_the_consumer_reaches_the_maker() -> None:
    def consume(items: Iterator[int]) -> None:
        next(items)
        raise OSError("disk full")

    def put(count: int) -> None:
        with Feed(consume, depth=1) as feed:
            for n in range(count):  # waits for ever if the fault does not arrive
                feed.put(n)
            feed.finish()

    for count in (1, 1000):
        with pytest.raises(OSError, match="disk full"):
            put(count)


def test_a_fault_of_the_maker_leaves_no_file_and_no_thread(tmp_path) -> None:
    frame = np.zeros((16, 16, 3), np.uint8)
    faults: list[type] = []

    def write(frames: Iterator[np.ndarray]) -> None:
        try:
            write_mp4(tmp_path / "x.mp4", frames, fps=8)
        except BaseException as fault:
            faults.append(type(fault))
            raise

    def interrupted() -> None:
        with Feed(write) as feed:
            feed.put(frame)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert faults == [Abandoned] and not list(tmp_path.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name == "wancore-feed"]


def test_an_interruption_while_the_thread_starts_leaves_no_file_and_no_thread(tmp_path, monkeypatch) -> None:
    feed = Feed(lambda frames: write_mp4(tmp_path / "x.mp4", frames, fps=8))
    start = feed._thread.start

    def interrupted() -> None:
        start()
        raise KeyboardInterrupt

    monkeypatch.setattr(feed._thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), feed:
        pass
    assert not feed._thread.is_alive()
    assert list(tmp_path.iterdir()) == []

"""Stand-ins for `torch.cuda`'s streams, whose work runs late, in any order that its events allow.

A stream keeps its work in a queue. `Streams.some` runs a random part of what may run; so does a thread that waits for
an event, until the event is over. A copy or a computation that waits for too little then meets wrong bytes.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wan_core.execution.memory.pinned_memory import PinnedMemory


class Event:
    def __init__(self, streams: Streams) -> None:
        self.streams, self.over = streams, False

    def synchronize(self) -> None:
        self.streams.until(self)


class Stream:
    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.queue: deque[Callable[[], object] | Event] = deque()  # work, or what to wait for
        streams.all.append(self)

    def do(self, work: Callable[[], object]) -> None:
        with self.streams.lock:
            self.queue.append(work)

    def wait_event(self, event: Event) -> None:
        with self.streams.lock:
            self.queue.append(event)

    def record_event(self) -> Event:
        event = Event(self.streams)
        self.do(lambda: setattr(event, "over", True))
        return event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Streams:
    def __init__(self, seed: int) -> None:
        self.drawn, self.lock = random.Random(seed), threading.RLock()
        self.all: list[Stream] = []
        self.main = Stream(self)

    def step(self) -> bool:
        """Run the first thing of a stream that may run; False where none may."""
        with self.lock:
            ready = [s for s in self.all if s.queue and (not isinstance(s.queue[0], Event) or s.queue[0].over)]
            if not ready:
                return False
            first = self.drawn.choice(ready).queue.popleft()
            if not isinstance(first, Event):
                first()
            return True

    def some(self) -> None:
        for _ in range(self.drawn.choice((0, 0, 1, 3, 10))):
            self.step()

    def until(self, event: Event) -> None:
        while not event.over:
            assert self.step(), "it waits for what nobody queued"

    def finish(self) -> None:
        while self.step():
            pass
        assert not any(stream.queue for stream in self.all)

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """For `torch.cuda`'s streams, in all threads."""
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(self))
        patch.setattr(torch.cuda, "current_stream", lambda device: self.main)
        patch.setattr(torch.cuda, "stream", Copies)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(PinnedMemory, "lock", lambda self: True)


class Copies(TorchDispatchMode):
    """Copies within it are queued on a stream."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        self.stream.do(lambda: target.copy_(source))
        return target

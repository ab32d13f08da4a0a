"""Weights that stay in their file, read while the device computes.

Threads read pieces into pinned buffers, in the order in which they were asked for, and queue their copies to the device
on streams of their own. `read` returns at once; who needs the weights waits for the `Arrival`: on the host until all
copies are queued, then on the device until they have ended. On a CPU pieces are read straight to their place.

Read that way a cold file comes at the rate of its disk, where copies out of a mapped file wait for single pages.
"""

from __future__ import annotations

import mmap
import os
import queue
import sys
import threading
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

THREADS = 4
PIECE = 8 << 20
BUFFERS = 2  # of a thread: one is filled while the other is copied


class Stretch(NamedTuple):
    """Bytes of a file: `nbytes` from `at` on, which belong to `start` of a unit."""

    path: str
    at: int
    start: int
    nbytes: int


class Piece(NamedTuple):
    arrival: Arrival
    stretch: Stretch
    target: Tensor
    ready: Any  # event after which the target may be written


class Arrival:
    """Stretches that are being read."""

    def __init__(self, pieces: int) -> None:
        self.left, self.cancelled = pieces, False
        self.events: list[Any] = []
        self.fault: BaseException | None = None
        self.changed = threading.Condition()

    def ended(self, event: Any = None, fault: BaseException | None = None) -> None:
        with self.changed:
            self.left -= 1
            self.fault = self.fault or fault
            if event is not None:
                self.events.append(event)
            self.changed.notify_all()

    def queued(self) -> list[Any]:
        """Events after the copies, once all are queued. Raises OSError where the file cannot be read."""
        with self.changed:
            self.changed.wait_for(lambda: self.left == 0)
        if self.fault is not None:
            raise self.fault
        return self.events

    def cancel(self) -> list[Any]:
        """Events after the copies that were begun; the others are not made any more."""
        with self.changed:
            self.cancelled = True
            self.changed.wait_for(lambda: self.left == 0)
        return self.events


class FileReader:
    """Reads for one device. Threads start with the first read and end with `close`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self.threads: list[threading.Thread] = []

    def read(self, stretches: Sequence[Stretch], flat: Tensor, ready: Any) -> Arrival:
        """Read them into `flat`, uint8, after the event `ready` (None: at once)."""
        if not self.threads:
            given = self.device, self.pieces  # not this object: it ends with its last reference, and they with it
            self.threads = [
                threading.Thread(target=_work, args=given, name=f"weights-{i}", daemon=True) for i in range(THREADS)
            ]
            for thread in self.threads:
                thread.start()
        cut = [
            Stretch(path, at + done, start + done, min(PIECE, nbytes - done))
            for path, at, start, nbytes in stretches
            for done in range(0, nbytes, PIECE)
        ]
        arrival = Arrival(len(cut))
        for one in cut:
            self.pieces.put(Piece(arrival, one, flat[one.start : one.start + one.nbytes], ready))
        return arrival

    def close(self) -> None:
        """Let the threads end after what is queued."""
        for _ in self.threads:
            self.pieces.put(None)
        self.threads = []

    def __del__(self) -> None:
        self.close()


# ---------------------------------------------------------------------------------------------------- in the threads


def _work(device: torch.device, pieces: queue.SimpleQueue[Piece | None]) -> None:
    with torch.inference_mode(False), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        thread = _Thread(device)
        while (piece := pieces.get()) is not None:
            event = fault = None
            try:
                if not piece.arrival.cancelled:
                    event = thread.read(piece)
            except BaseException as raised:  # noqa: BLE001  (any fault: who waits for the piece raises it)
                fault = raised
            piece.arrival.ended(event, fault)
            del piece
        thread.close()


class _Thread:
    """What a thread has of its own: open files, a stream, buffers with the events after which they are free."""

    def __init__(self, device: torch.device) -> None:
        self.files: dict[str, int] = {}
        self.turn = 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers: list[Tensor] = []
        self.left: list[Any] = [None] * BUFFERS
        if self.stream is not None:
            self.buffers = list(torch.empty(BUFFERS * PIECE, dtype=torch.uint8, pin_memory=True).split(PIECE))

    def read(self, piece: Piece) -> Any:
        """Read it, and queue its copy; the event after the copy."""
        path, at, _, nbytes = piece.stretch
        if path not in self.files:
            self.files[path] = os.open(path, os.O_RDONLY)
        if self.stream is None:
            _read_into(self.files[path], at, piece.target)
            return None
        turn, self.turn = self.turn, (self.turn + 1) % BUFFERS
        if self.left[turn] is not None:
            self.left[turn].synchronize()
        buffer = self.buffers[turn][:nbytes]
        _read_into(self.files[path], at, buffer)
        with torch.cuda.stream(self.stream):
            if piece.ready is not None:
                self.stream.wait_event(piece.ready)
            piece.target.copy_(buffer, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self.stream)
        self.left[turn] = event
        return event

    def close(self) -> None:
        for event in self.left:
            if event is not None:
                event.synchronize()
        for file in self.files.values():
            os.close(file)


def read_stretch(stretch: Stretch, flat: Tensor) -> None:
    """Read it to its place in a unit in host memory, uint8. Raises OSError."""
    file = os.open(stretch.path, os.O_RDONLY)
    try:
        _read_into(file, stretch.at, flat[stretch.start : stretch.start + stretch.nbytes])
    finally:
        os.close(file)


def _read_into(file: int, at: int, target: Tensor) -> None:
    content = target.numpy().data
    while content:
        done = os.preadv(file, [content], at) if hasattr(os, "preadv") else _seek_and_read(file, at, content)
        if not done:
            raise OSError(f"the file ends at byte {at}, and {len(content)} more are needed")
        content, at = content[done:], at + done


def _seek_and_read(file: int, at: int, content: memoryview) -> int:
    """Where files cannot be read at an offset: each thread has its own."""
    os.lseek(file, at, os.SEEK_SET)
    data = os.read(file, len(content))
    content[: len(data)] = data
    return len(data)


MAPS, PAGES = Path("/proc/self/maps"), Path("/proc/self/pagemap")
PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Mapped:
    """Addresses begin..end show `path` from byte `at` on."""

    begin: int
    end: int
    path: str
    at: int


class MappedFiles:
    """The files that this process maps, as they are when this is made; none on systems that do not list them."""

    def __init__(self) -> None:
        self.mapped: list[Mapped] = []
        if sys.platform == "linux" and MAPS.exists() and PAGES.exists():
            lines = MAPS.read_text(errors="surrogateescape").splitlines()
            self.mapped = sorted((one for line in lines if (one := _parse(line))), key=lambda one: one.begin)
        self.begins = [one.begin for one in self.mapped]

    def find(self, tensor: Tensor) -> tuple[str, int] | None:
        """File and offset of the tensor's bytes; None where no one file has all of them."""
        if tensor.device.type != "cpu" or not tensor.nbytes:
            return None
        begin = tensor.data_ptr()
        index = bisect_right(self.begins, begin) - 1
        if index < 0 or begin + tensor.nbytes > self.mapped[index].end or changed_pages(tensor):
            return None
        one = self.mapped[index]
        return one.path, one.at + begin - one.begin


def changed_pages(tensor: Tensor) -> bool:
    """Whether any of a tensor's memory was written since it was mapped, and is no longer the file's."""
    first, last = tensor.data_ptr() // PAGE, (tensor.data_ptr() + tensor.nbytes - 1) // PAGE
    with PAGES.open("rb", buffering=0) as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * (last - first + 1)), np.uint64)
    present, swapped, of_file = (entries >> np.uint64(bit) & np.uint64(1) for bit in (63, 62, 61))
    return len(entries) <= last - first or bool((swapped | present & ~of_file & np.uint64(1)).any())


def _parse(line: str) -> Mapped | None:
    """`begin-end rights offset major:minor inode path`. None for memory without a file, and for a file that has been
    replaced or removed since it was mapped."""
    fields = line.split(maxsplit=5)
    if len(fields) < 6 or not fields[5].startswith("/"):
        return None
    begin, end = (int(number, 16) for number in fields[0].split("-"))
    try:
        status = os.stat(fields[5])
    except OSError:
        return None
    major, minor = (int(number, 16) for number in fields[3].split(":"))
    if int(fields[4]) != status.st_ino or (os.major(status.st_dev), os.minor(status.st_dev)) != (major, minor):
        return None
    return Mapped(begin, end, fields[5], int(fields[2], 16))

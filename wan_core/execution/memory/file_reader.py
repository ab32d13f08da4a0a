"""Weights that stay in their file, read while the device computes.

Threads read pieces into pinned buffers, in the order in which they were asked for, and queue their copies to the device
on streams of their own. `read` returns at once; who needs the weights waits for the `Arrival`: on the host until all
copies are queued, then on the device until they have ended. On a CPU pieces are read straight to their place.

Read that way a cold file comes at the rate of its disk, where copies out of a mapped file wait for single pages.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
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

    def read(self, flat: Tensor) -> None:
        """Read it to its place in a unit in host memory, uint8. Raises OSError."""
        _read_into(self.path, self.at, flat[self.start : self.start + self.nbytes])


class Arrival:
    """Stretches that are being read. pieces: their results are the events after their copies, None on a CPU."""

    def __init__(self, pieces: Sequence[Future[Any]]) -> None:
        self.pieces = pieces

    def queued(self) -> list[Any]:
        """Events after the copies, once all are queued. Raises OSError where the file cannot be read."""
        return [piece.result() for piece in self.pieces]

    def cancel(self) -> list[Any]:
        """Events after the copies that were begun; the others are not made any more."""
        begun = [piece for piece in self.pieces if not piece.cancel()]
        wait(begun)
        return [piece.result() for piece in begun if piece.exception() is None]


class FileReader:
    """Reads for one device. Threads start with the first read and end with this object."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.threads = ThreadPoolExecutor(THREADS, "weights")
        self.buffers = threading.local()

    def read(self, stretches: Sequence[Stretch], flat: Tensor, ready: Any) -> Arrival:
        """Read them into `flat`, uint8, after the event `ready` (None: at once)."""
        cut = [
            Stretch(path, at + done, start + done, min(PIECE, nbytes - done))
            for path, at, start, nbytes in stretches
            for done in range(0, nbytes, PIECE)
        ]
        given = self.device, self.buffers  # not this object: it ends with its last reference, and the threads with it
        return Arrival([self.threads.submit(_read_piece, *given, piece, flat, ready) for piece in cut])


def _read_piece(device: torch.device, local: threading.local, piece: Stretch, flat: Tensor, ready: Any) -> Any:
    """In a thread: read a piece, and queue its copy. Returns the event after the copy."""
    if device.type != "cuda":
        return piece.read(flat)
    if not hasattr(local, "buffers"):
        local.buffers = _Buffers(device)
    return local.buffers.read(piece, flat, ready)


class _Buffers:
    """Pinned memory of a thread, with the events after which it is free, and the stream of the copies."""

    def __init__(self, device: torch.device) -> None:
        if device.index is not None:
            torch.cuda.set_device(device)  # a new thread's is the first GPU, whose memory pinning would take
        self.stream = torch.cuda.Stream(device)
        self.memory = torch.empty(BUFFERS * PIECE, dtype=torch.uint8, pin_memory=True).split(PIECE)
        self.copied: list[Any] = [None] * BUFFERS
        self.turn = 0

    def read(self, piece: Stretch, flat: Tensor, ready: Any) -> Any:
        turn, self.turn = self.turn, (self.turn + 1) % BUFFERS
        if self.copied[turn] is not None:
            self.copied[turn].synchronize()
        buffer = self.memory[turn][: piece.nbytes]
        _read_into(piece.path, piece.at, buffer)
        with torch.cuda.stream(self.stream):
            if ready is not None:
                self.stream.wait_event(ready)
            flat[piece.start : piece.start + piece.nbytes].copy_(buffer, non_blocking=True)
            event = self.copied[turn] = torch.cuda.Event()
            event.record(self.stream)
        return event


def _read_into(path: str, at: int, target: Tensor) -> None:
    content = target.numpy().data
    with open(path, "rb", buffering=0) as file:
        file.seek(at)
        while content:
            done = file.readinto(content)
            if not done:
                raise OSError(f"the file ends at byte {file.tell()}, and {len(content)} more are needed")
            content = content[done:]


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

"""Weights that stay in their file, read while the device computes.

Threads read pieces into pinned buffers, the most urgent first, and queue their copies to the device on streams of their
own. `read` returns at once; who needs the weights waits for the `Arrival`: on the host until all copies are queued,
then on the device until they have ended.

Read that way a cold file comes at the rate of its disk, where copies out of a mapped file wait for single pages. A file
that is read again and again and is larger than the memory for cached files is never found there: its pages would only
drive out those of other files. It is read past that cache, where the file system can do that.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from heapq import heapify
from itertools import count
from pathlib import Path
from queue import PriorityQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wan_core.config.host_memory import available_bytes
from wan_core.execution.memory.pinned_memory import PinnedMemory

log = logging.getLogger(__name__)
THREADS = 4
PIECE = 8 << 20
BUFFERS = 2  # of a thread: one is filled while the other is copied
SECTOR = 4096  # bytes: reads past the cache begin at multiples of it, in the file and in memory
DIRECT = getattr(os, "O_DIRECT", 0)


class Stretch(NamedTuple):
    """Bytes of a file: `nbytes` from `at` on, which belong to `start` of a unit."""

    path: str
    at: int
    start: int
    nbytes: int


class Urgency(NamedTuple):
    """How urgent a read is. of_next: the expert in use does not need it, the next one does. for_blocks: the blocks need
    it, not what a prompt prepares. unit: its number."""

    of_next: bool = False
    for_blocks: bool = False
    unit: int = 0

    @property
    def place(self) -> tuple[int, ...]:
        """The least comes first. Memory for the next expert becomes free block by block: a thread would wait for it."""
        return (1, self.unit, self.for_blocks) if self.of_next else (0, self.for_blocks, self.unit)


URGENT = Urgency()


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
        self.waiting: PriorityQueue[tuple[Any, ...]] = PriorityQueue()
        self.numbers = count()
        self.buffers = threading.local()
        self.bytes = 0  # that were asked for

    def read(self, stretches: Sequence[Stretch], flat: Tensor, ready: Any, urgency: Urgency = URGENT) -> Arrival:
        """Read them into `flat`, uint8, after the event `ready` (None: at once)."""
        pieces: list[Future[Any]] = []
        for piece in pieces_of(stretches):
            future: Future[Any] = Future()
            self.waiting.put((urgency.place, next(self.numbers), urgency, piece, flat, ready, future))
            self.bytes += sum(stretch.nbytes for stretch in piece)
            # Not this object: it ends with its last reference, and the threads with it.
            self.threads.submit(_read_next, self.device, self.waiting, self.buffers)
            pieces.append(future)
        return Arrival(pieces)

    def next_is_used(self) -> None:
        """The next expert is the one in use from now on."""
        with self.waiting.mutex:
            for index, (_, number, urgency, *what) in enumerate(self.waiting.queue):
                urgency = urgency._replace(of_next=False)
                self.waiting.queue[index] = urgency.place, number, urgency, *what
            heapify(self.waiting.queue)


def pieces_of(stretches: Sequence[Stretch]) -> list[list[Stretch]]:
    """Stretches that are read together: neighbours in their file, at most `PIECE` bytes from a `SECTOR` on."""
    pieces: list[list[Stretch]] = []
    before, end, limit = "", 0, 0
    for path, at, start, nbytes in sorted(stretches):
        while nbytes:
            if path != before or at >= min(limit, end + SECTOR):
                pieces.append([])
                limit = at // SECTOR * SECTOR + PIECE
            part = min(nbytes, limit - at)
            pieces[-1].append(Stretch(path, at, start, part))
            at, start, nbytes = at + part, start + part, nbytes - part
            before, end = path, at
    return pieces


def read_now(stretches: Sequence[Stretch], flat: Tensor) -> None:
    """Read them to their places in host memory. Raises OSError."""
    buffers = Buffers(flat.device)
    for piece in pieces_of(stretches):
        buffers.read(piece, flat, None)


def _read_next(device: torch.device, waiting: PriorityQueue[tuple[Any, ...]], local: threading.local) -> None:
    """In a thread: read the most urgent piece, and queue its copy. Its result is the event after the copy."""
    *_, piece, flat, ready, future = waiting.get()
    if not future.set_running_or_notify_cancel():
        return
    try:
        if not hasattr(local, "buffers"):
            local.buffers = Buffers(device)
        future.set_result(local.buffers.read(piece, flat, ready))
    except BaseException as fault:  # noqa: BLE001  (`Arrival.queued` raises it)
        future.set_exception(fault)


class Buffers:
    """Memory of a thread, with the events after which it is free, and the stream of the copies."""

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream | None = None
        self.copied: list[Any] = [None] * BUFFERS
        pages = PinnedMemory(BUFFERS * PIECE)
        if device.type == "cuda":
            if device.index is not None:
                torch.cuda.set_device(device)  # a new thread's is the first GPU, whose memory pinning would take
            self.stream = torch.cuda.Stream(device)
            pages.lock()
        self.pages, self.memory = pages, pages.bytes.split(PIECE)
        self.turn = 0
        self.past_cache: dict[str, bool] = {}

    def __del__(self) -> None:
        for event in filter(None, self.copied):
            event.synchronize()

    def read(self, piece: list[Stretch], flat: Tensor, ready: Any) -> Any:
        """Read a piece and queue its copies to `flat`, after the event `ready`. Returns the event after them."""
        path, begin = piece[0].path, piece[0].at // SECTOR * SECTOR
        if path not in self.past_cache:
            available = available_bytes()  # of which files that take turns, as those of two experts, have a share
            self.past_cache[path] = available is not None and available < 2 * os.stat(path).st_size
        if self.stream is None and not self.past_cache[path]:  # straight to its place
            for _, at, start, nbytes in piece:
                _read_into(path, at, nbytes, flat[start : start + nbytes], 0)
            return None
        turn, self.turn = self.turn, (self.turn + 1) % BUFFERS
        if self.copied[turn] is not None:
            self.copied[turn].synchronize()
        buffer, end = self.memory[turn], piece[-1].at + piece[-1].nbytes
        sectors = buffer[: -(-(end - begin) // SECTOR) * SECTOR]
        try:
            _read_into(path, begin, end - begin, sectors, DIRECT if self.past_cache[path] else 0)
        except OSError as fault:  # it comes again, or the file system reads through the cache alone
            log.info("%s is read through the cache for files (%s)", path, fault)
            self.past_cache[path] = False
            _read_into(path, begin, end - begin, sectors, 0)
        stream = self.stream
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if stream is not None and ready is not None:
                stream.wait_event(ready)
            for _, at, start, nbytes in piece:
                flat[start : start + nbytes].copy_(buffer[at - begin : at - begin + nbytes], non_blocking=True)
            if stream is not None:
                self.copied[turn] = stream.record_event()
        return self.copied[turn]


def _read_into(path: str, at: int, nbytes: int, memory: Tensor, flags: int) -> None:
    """Read `nbytes` from `at` on into `memory`, and what is behind them as far as it is longer."""
    content, done = memory.numpy().data, 0
    file = os.open(path, os.O_RDONLY | flags)
    try:
        while done < nbytes:
            got = os.preadv(file, [content[done:]], at + done)
            if not got:
                raise OSError(f"the file ends at byte {at + done}, and {nbytes - done} more are needed")
            done += got
    finally:
        os.close(file)


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

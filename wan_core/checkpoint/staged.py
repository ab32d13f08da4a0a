"""Many tensors of a checkpoint at once: read in parallel, and for a GPU through pinned staging buffers.

Threads read pieces of the files, in the order in which the caller asks for the tensors. For a GPU, each piece goes into
a pinned buffer and from there to its place on the device while the next is read; the caller converts or quantises
tensors meanwhile. Host memory is that of the buffers, whatever the size of the checkpoint; memory for tensors that were
read and not yet asked for is bounded too.

Processes that read together (`Checkpoint.readers`) each read their part of a large tensor ahead, directly into its
place in the whole. The parts of the others arrive when the tensor is asked for: by then this process has read further,
so that exchanges and reading overlap. If the file of one process cannot be read, the others wait in an exchange until
its timeout.

The page cache is used: cold disks were measured to give the same with and without it, and a second load is warm.

Legend: a part is what one of several readers reads of a tensor, a piece at most `PIECE` bytes of one tensor.
"""

from __future__ import annotations

import io
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wan_core.checkpoint.opened import Checkpoint, CheckpointError, Readers
from wan_core.checkpoint.switch_interval import SWITCH_INTERVAL

# Of one process: each needs the GIL between two pieces, and so does the thread that converts what they read. On a host
# of H200s with 32 cores, 8 and 16 load an expert of 14.3 GB in 0.55 and 0.52 s, and with a LoRA in 0.70 and 1.02.
MOST_THREADS = 8
SMALL = 4096  # bytes of a tensor that is read before the threads begin: a scale would take as many calls as a piece
PIECE = 16 << 20
READS_AT = hasattr(os, "preadv")  # in one call; not on Windows
BUFFERS = 2  # of a thread: one is filled while the other is copied
AHEAD = 1 << 30  # bytes that may be on the device, or on their way, before they are taken; twice that for processes
# that read together, each of which has a part of them to read


@dataclass(frozen=True)
class Reading:
    """How a checkpoint is read. on_bytes: called with every number of bytes that were read, from the thread that loads;
    may raise to stop. mapped: on a CPU, map files instead of reading them. stays: what is used as it is stored stays in
    the mapped file, also where a GPU encodes the rest. staged: False maps them for a GPU as well, and copies from
    there. threads: that read one checkpoint; None: `default_threads`. layers: the blocks of a transformer that are
    read, the others stay on the meta device; None: all. turn: called before every exchange with other ranks, and waits
    until it is this model's turn; may raise to stop. share: puts something between a file and what is loaded from it:
    ranks that read it together."""

    on_bytes: Callable[[int], None] | None = None
    mapped: bool = True
    stays: bool = False
    staged: bool = True
    threads: int | None = None
    layers: range | None = None
    turn: Callable[[], None] = lambda: None
    share: Callable[[Checkpoint], Checkpoint] | None = None

    def reads(self, name: str) -> bool:
        if self.layers is None or not name.startswith("blocks."):
            return True
        return int(name.split(".")[1]) in self.layers


USUAL = Reading()


def default_threads(processes: int = 1) -> int:
    """For all that one of `processes` on this host reads at once: half of the cores. Out of a warm page cache, on hosts
    of H200s: with 16 cores, 8 threads read 25 GB/s and 32 read 19; with 32, 8 read 23 and 16 read 33; one reads 1.5 to
    3."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MOST_THREADS, max(4, cores // 2 // processes))


@contextmanager
def reading(
    checkpoint: Checkpoint, names: Sequence[str], device: torch.device, how: Reading = USUAL
) -> Iterator[Callable[[str], Tensor]]:
    """A function that reads tensors of `checkpoint` in the order of `names`: ahead, in threads, or from the mapping."""
    if how.staged and (device.type == "cuda" or not how.mapped):
        with Feed(checkpoint, names, device, how) as feed:
            yield feed.read
        return

    whole = checkpoint.whole

    def read(name: str) -> Tensor:
        if how.on_bytes is not None:
            how.on_bytes(checkpoint.info(name).nbytes)
        return whole(name)

    yield read


@dataclass(eq=False)
class Wanted:
    """A tensor that is being read. `begin`, `end`: its bytes that this process reads; `part`: bytes of each reader's
    part, 0 where one reads the whole. `flat`: memory for its bytes, and for those by which the parts reach beyond its
    end; `left`: pieces that are still to be read."""

    name: str
    nbytes: int
    begin: int
    end: int
    part: int = 0
    flat: Tensor | None = None
    left: int = 0
    ready: list[Any] = field(default_factory=list)  # events after its copies
    room: Any = None  # event: the memory of `flat` is free for it


def _wanted(name: str, nbytes: int, readers: Readers | None) -> Wanted:
    if readers is None or nbytes <= readers.small:
        return Wanted(name, nbytes, 0, nbytes)
    part = readers.part(nbytes)
    begin = min(readers.index * part, nbytes)
    return Wanted(name, nbytes, begin, min(begin + part, nbytes), part)


@dataclass(frozen=True)
class Piece:
    wanted: Wanted
    path: Path
    at: int  # in the file
    start: int  # in the tensor
    nbytes: int


@dataclass(eq=False)
class Buffer:
    """Pinned memory. `left`: event after which its content has been copied."""

    memory: Tensor
    bytes: memoryview
    left: Any = None


class Feed:
    """Reads `names` ahead, in their order; `read` gives one, on `device`, with dtype and shape of the file.

    Tensors that have no place in a file (a pickle's, a state dict's) come from `checkpoint` itself.
    """

    def __init__(self, checkpoint: Checkpoint, names: Sequence[str], device: torch.device, how: Reading) -> None:
        self.checkpoint, self.device, self.how = checkpoint, device, how
        self.cuda = device.type == "cuda"
        readers = checkpoint.readers  # those that gather elsewhere are of no use: then each reads everything
        self.readers = readers if readers is not None and readers.device.type == device.type else None
        placed = [name for name in names if name in checkpoint.places and checkpoint.info(name).nbytes]
        self.small = self._read_small([name for name in placed if checkpoint.info(name).nbytes <= SMALL])
        placed = [name for name in placed if name not in self.small]
        self.order = deque(_wanted(name, checkpoint.info(name).nbytes, self.readers) for name in placed)
        self.under_way: dict[str, Wanted] = {}
        self.bytes_ahead = 0
        self.ahead = AHEAD * (1 if checkpoint.readers is None else 2)
        self.pieces: deque[Piece] = deque()
        self.changed = threading.Condition()
        self.closed, self.ended = False, False
        self.fault: BaseException | None = None
        total = sum(wanted.end - wanted.begin for wanted in self.order)
        threads = how.threads or default_threads(1 if checkpoint.readers is None else checkpoint.readers.count)
        self.threads = [
            threading.Thread(target=self._work, name=f"read-{i}", daemon=True)
            for i in range(min(threads, -(-total // PIECE)))
        ]
        self.switching = ExitStack()
        try:
            self.switching.enter_context(SWITCH_INTERVAL.short())
            for thread in self.threads:
                thread.start()
            self._go_on()
        except BaseException:  # no memory, no more threads: those that have begun would wait for ever
            self.close()
            raise

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, name: str) -> Tensor:
        """The tensor `name`. Raises CheckpointError where the file cannot be read (any more)."""
        info = self.checkpoint.info(name)
        if self.how.on_bytes is not None:
            self.how.on_bytes(info.nbytes)
        wanted = self.under_way.get(name)
        if wanted is None:
            small = self.small.pop(name, None)
            return (self.checkpoint.whole(name) if small is None else small).to(self.device)
        with self.changed:
            self.changed.wait_for(lambda: wanted.left == 0 or self.fault is not None)
            if (fault := self.fault) is not None:
                raise self._unreadable(name, fault) from fault
        del self.under_way[name]
        self.bytes_ahead -= wanted.nbytes
        self._go_on()
        assert wanted.flat is not None
        if wanted.ready:
            stream = torch.cuda.current_stream(self.device)
            for event in wanted.ready:
                stream.wait_event(event)
        if wanted.part:
            assert self.readers is not None
            begin = self.readers.index * wanted.part
            self.readers.gather(wanted.flat, wanted.flat[begin : begin + wanted.part])
        flat = wanted.flat[: wanted.nbytes] if wanted.nbytes < len(wanted.flat) else wanted.flat
        return flat.view(info.dtype).reshape(info.shape)

    def _read_small(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors in host memory, read at once and not mapped: a file that becomes shorter is an error here, where a
        mapped one ends the process."""
        tensors: dict[str, Tensor] = {}
        with ExitStack() as files, torch.inference_mode(False):
            opened: dict[Path, io.FileIO] = {}
            for name in sorted(names, key=self.checkpoint.places.__getitem__):  # in the order of the file
                info, (path, at) = self.checkpoint.info(name), self.checkpoint.places[name]
                flat = torch.empty(info.nbytes, dtype=torch.uint8)
                try:
                    if path not in opened:
                        opened[path] = files.enter_context(io.FileIO(path))
                    _read_into(opened[path], at, _bytes_of(flat))
                except OSError as fault:
                    raise self._unreadable(name, fault) from fault
                tensors[name] = flat.view(info.dtype).reshape(info.shape)
        return tensors

    def _unreadable(self, name: str, fault: BaseException) -> CheckpointError:
        cause = str(fault) or type(fault).__name__
        return CheckpointError(f"{name} cannot be read ({cause})", where=self.checkpoint.where)

    def close(self) -> None:
        """Stop reading. Copies that are under way end first: their buffers and their places are still in use."""
        with self.changed:
            self.closed = True
            self.pieces.clear()
            self.changed.notify_all()
        for thread in self.threads:
            if thread.ident is not None:  # it has begun
                thread.join()
        self.switching.close()
        for wanted in self.under_way.values():
            for event in wanted.ready:
                event.synchronize()
        self.under_way.clear()
        self.order.clear()

    def _go_on(self) -> None:
        """Make places for the next tensors, as far as there may be."""
        while self.order and (not self.under_way or self.bytes_ahead + self.order[0].nbytes <= self.ahead):
            wanted = self.order.popleft()
            with torch.inference_mode(False):  # other threads write into it, in a mode of their own
                whole = wanted.nbytes if self.readers is None else max(wanted.nbytes, self.readers.count * wanted.part)
                wanted.flat = torch.empty(whole, dtype=torch.uint8, device=self.device)
            if self.cuda:
                wanted.room = torch.cuda.Event()
                wanted.room.record(torch.cuda.current_stream(self.device))
            path, at = self.checkpoint.places[wanted.name]
            starts = range(wanted.begin, wanted.end, PIECE)
            wanted.left = len(starts)
            self.under_way[wanted.name] = wanted
            self.bytes_ahead += wanted.nbytes
            with self.changed:
                for start in starts:
                    self.pieces.append(Piece(wanted, path, at + start, start, min(PIECE, wanted.end - start)))
                self.ended = not self.order
                self.changed.notify_all()

    # ------------------------------------------------------------------------------------------------ in the threads

    def _work(self) -> None:
        try:
            with torch.cuda.device(self.device) if self.cuda else nullcontext():  # threads begin on the first GPU
                self._read_pieces()
        except BaseException as fault:  # noqa: BLE001  (any fault: `read` would wait for ever)
            with self.changed:
                self.fault = self.fault or fault
                self.changed.notify_all()

    def _read_pieces(self) -> None:
        """Every call that releases the GIL may wait to get it back while another thread imports or traces. Per piece
        these are one read, one view, one copy with its event, and the wait for a buffer."""
        files: dict[Path, io.FileIO] = {}
        buffers: list[Buffer] = []
        try:
            if self.cuda:
                torch.cuda.set_stream(stream := torch.cuda.Stream(self.device))  # of this thread
                memory = torch.empty(BUFFERS * PIECE, dtype=torch.uint8, pin_memory=True)
                buffers = [Buffer(part, _bytes_of(part)) for part in memory.split(PIECE)]
            turn, room = 0, None
            while (piece := self._next()) is not None:
                file = files.get(piece.path)
                if file is None:
                    file = files[piece.path] = io.FileIO(piece.path)
                wanted, end = piece.wanted, piece.start + piece.nbytes
                assert wanted.flat is not None
                target = wanted.flat[piece.start : end] if piece.nbytes < len(wanted.flat) else wanted.flat
                event = None
                if not self.cuda:
                    _read_into(file, piece.at, _bytes_of(target))
                else:
                    buffer = buffers[turn]
                    turn = (turn + 1) % BUFFERS
                    if buffer.left is not None:
                        buffer.left.synchronize()
                    _read_into(file, piece.at, buffer.bytes[: piece.nbytes])
                    if wanted.room is not room:
                        stream.wait_event(room := wanted.room)
                    full = piece.nbytes == PIECE
                    target.copy_(buffer.memory if full else buffer.memory[: piece.nbytes], non_blocking=True)
                    event = buffer.left = torch.cuda.Event()
                    event.record(stream)
                with self.changed:
                    if event is not None:
                        wanted.ready.append(event)
                    wanted.left -= 1
                    if wanted.left == 0:
                        self.changed.notify_all()
        finally:
            for buffer in buffers:
                if buffer.left is not None:
                    buffer.left.synchronize()
            for file in files.values():
                file.close()

    def _next(self) -> Piece | None:
        with self.changed:
            self.changed.wait_for(lambda: self.pieces or self.closed or self.fault or self.ended)
            return self.pieces.popleft() if self.pieces and not (self.closed or self.fault) else None


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # pyright: ignore[reportArgumentType]


def _read_into(file: io.FileIO, at: int, target: memoryview) -> None:
    """Fill `target` from `at` on. Raises OSError if the file ends before."""
    while len(target):
        if READS_AT:
            count = os.preadv(file.fileno(), [target], at)
        else:
            file.seek(at)
            count = file.readinto(target)
        if not count:
            raise OSError("the file has become shorter")
        target, at = target[count:], at + count

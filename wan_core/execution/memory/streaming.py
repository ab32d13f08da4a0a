"""Device memory in which models take turns, and blocks that stream through it.

A `Stage` holds what a transformer needs on the device: its rest and so many blocks stay, the others come through two
slots, one copied while the other computes: at 55 GB/s, 13 ms for an A14B block in bf16, which computes for 55 ms at
480p. Experts take turns: in the last forward of one, each block that stays makes room for the same block of the next,
whose first forward waits for each as it comes to it. The loop over the blocks tells its `weights`, the stage, which one
comes next. A text encoder goes through a stage of its own. On a CPU the same happens with plain copies and without
waiting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wan_core.execution.memory.file_reader import Arrival, FileReader, Urgency
from wan_core.execution.memory.host_weights import HostWeights, streaming_order
from wan_core.execution.report import GIB
from wan_core.models.block_weights import BlockWeights

log = logging.getLogger(__name__)
SLOTS = 2
REST = 0  # the unit of what belongs to no block; block i is unit i + 1


class Copied(NamedTuple):
    """A copy to the device: the event after what was copied from memory, and what is read from a file."""

    event: Any
    arrival: Arrival | None


@dataclass(eq=False)
class Slot:
    """Device memory of a unit that stays, or of the blocks that stream. holds: whose unit, and which. text, rest: what
    was copied of what a prompt needs, and of the rest. used: event after the block that was computed with it."""

    memory: Tensor
    holds: tuple[HostWeights, int] | None = None
    text: Copied | None = None
    rest: Copied | None = None
    used: Any = None


def spread(blocks: int, resident: int) -> list[int]:
    """Which of `blocks` blocks stream when `resident` stay."""
    return sorted(streaming_order(blocks)[: max(0, blocks - resident)])


def stage_bytes(units: Sequence[int], resident: int | None) -> int:
    """Device memory of a stage for units of so many bytes, the rest first; resident None: all blocks stay."""
    outside_blocks, *blocks = units
    streamed = spread(len(blocks), len(blocks) if resident is None else resident)
    staying = outside_blocks + sum(nbytes for i, nbytes in enumerate(blocks) if i not in streamed)
    return staying + SLOTS * max((blocks[i] for i in streamed), default=0)


class Stage(BlockWeights):
    """resident: how many blocks stay; None: all. Models that share a stage have one layout.

    A transformer whose `runners.weights` is a stage, or a text encoder whose `weights` is one, tells it which block it
    needs next.
    """

    name = "streamed"

    def __init__(self, device: torch.device, resident: int | None = None) -> None:
        self.device, self.resident = device, resident
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.reader, self.waited = FileReader(device), 0.0  # seconds, for what was read
        self.kept: dict[int, Slot] = {}
        self.slots: list[Slot] = []
        self.streamed: list[int] = []  # units
        self.latest: Slot | None = None  # of a block that streams, entered last
        self.current: HostWeights | None = None
        self.following: HostWeights | None = None  # takes the place of `current` behind its last forward

    @property
    def is_empty(self) -> bool:
        return not self.kept

    @property
    def held(self) -> int:
        return sum(len(one.memory) for one in (*self.kept.values(), *self.slots))

    def nbytes(self, weights: HostWeights) -> int:
        """Device memory for `weights`."""
        return stage_bytes([unit.layout.nbytes for unit in weights.units], self.resident)

    def has(self, weights: HostWeights) -> bool:
        """Whether any of `weights` are here, or are being copied."""
        held = [slot.holds[0] for slot in (*self.slots, *self.kept.values()) if slot.holds is not None]
        return self.current is weights or any(one is weights for one in held)

    def use(self, weights: HostWeights, following: HostWeights | None = None) -> None:
        """Make the model of `weights` ready; another's leaves. following: of the same layout, replaces them block by
        block in their last run. Raises what an allocation raises, with nothing left on the device."""
        with self._quietly():
            if self.current is not None and self.current is not weights:
                self.current.point_to_host()
                self._note_reading()
            self.reader.next_is_used()
            self.current, self.following = weights, following
            if self.is_empty:
                try:
                    self._allocate(weights)
                except torch.cuda.OutOfMemoryError:
                    self.leave_device()
                    raise
            self._copies_wait(self._mark())
            for whole in (False, True):
                for unit, slot in self.kept.items():
                    self._fill(slot, weights, unit, whole)
            for unit, slot in self.kept.items():
                weights.units[unit].bind(slot.memory)
            self._wait(self.kept[REST].rest)

    def leave_device(self) -> None:
        with self._quietly():
            for slot in (*self.slots, *self.kept.values()):  # memory may be given to others only after copies into it
                self._stop_reading(slot)
            if self.stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(self.stream)
            if self.current is not None:
                self.current.point_to_host()
                self._note_reading()
            self.kept.clear()
            self.slots.clear()
            self.current = self.following = self.latest = None

    # --------------------------------------------------------------------------------------- while the blocks run

    def enter(self, block: int, *, text: bool = False) -> None:
        """Have the weights of `block` there, or only those that a prompt needs, and have the next ones copied."""
        weights, unit = self.current, block + 1
        assert weights is not None, "blocks of a model that is not in use"
        with self._quietly():
            slot = self._slot(weights, unit)
            self._fill(slot, weights, unit, whole=not text)
            self._wait(slot.text)
            if not text:
                self._wait(slot.rest)
            if unit in self.kept:
                return
            self.latest = slot
            weights.units[unit].bind(slot.memory)
            at = self.streamed.index(unit) + 1
            wraps = at == len(self.streamed)
            following = self.streamed[at % len(self.streamed)]
            self._fill(self._slot(weights, following), weights, following, whole=wraps or not text)

    def leave(self, block: int, *, last: bool = False) -> None:
        """What `block` computes has been launched."""
        slot = self.kept.get(block + 1, self.latest)
        assert slot is not None, "a block that was not entered"
        slot.used = self._mark()
        if last and self.following is not None and slot is not self.latest:
            with self._quietly():
                self._fill(slot, self.following, block + 1, whole=True)

    def _slot(self, weights: HostWeights, unit: int) -> Slot:
        """Where a unit stays or is already, or the slot that was entered longest ago."""
        if unit in self.kept:
            return self.kept[unit]
        same = (slot for slot in self.slots if slot.holds == (weights, unit))
        return next(same, None) or next(slot for slot in self.slots if slot is not self.latest)

    def _fill(self, slot: Slot, weights: HostWeights, unit: int, whole: bool) -> None:
        """Have a unit copied, or what a prompt needs of it, as far as it is not there."""
        if slot.holds != (weights, unit):
            self._stop_reading(slot)
            self._copies_wait(slot.used)
            slot.holds, slot.text, slot.rest = (weights, unit), None, None
        layout = weights.units[unit].layout
        if slot.text is None:
            slot.text = self._copy(unit, weights, slot.memory, 0, layout.text_bytes)
        if whole and slot.rest is None:
            slot.rest = self._copy(unit, weights, slot.memory, layout.text_bytes, layout.nbytes)

    def _copy(self, unit: int, weights: HostWeights, memory: Tensor, start: int, stop: int) -> Copied:
        """Queue the copy of bytes start..stop of a unit, and have what is in its file read."""
        source, arrival = weights.units[unit], None
        if stretches := source.in_file(start, stop):
            urgency = Urgency(weights is not self.current, unit != REST and start > 0, unit)
            arrival = self.reader.read(stretches, memory, self._mark(self.stream), urgency)
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            source.copy_to(memory, start, stop)
        return Copied(self._mark(self.stream), arrival)

    def _stop_reading(self, slot: Slot) -> None:
        """What is read into its memory ends, before it is written again."""
        for copied in (slot.text, slot.rest):
            if copied is not None and copied.arrival is not None:
                for event in copied.arrival.cancel():
                    self._copies_wait(event)

    def _allocate(self, weights: HostWeights) -> None:
        sizes = [unit.layout.nbytes for unit in weights.units]
        blocks = len(sizes) - 1
        resident = blocks if self.resident is None else min(self.resident, blocks)
        self.streamed = [i + 1 for i in spread(blocks, resident)]
        largest = max((sizes[unit] for unit in self.streamed), default=0)
        for unit, nbytes in enumerate(sizes):
            if unit not in self.streamed:
                self.kept[unit] = Slot(self._empty(nbytes))
        self.slots = [Slot(self._empty(largest)) for _ in range(SLOTS if self.streamed else 0)]

    def _empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    # ------------------------------------------------------------------------------------------ streams and events

    def _mark(self, stream: Any = None) -> Any:
        """An event at what was queued on `stream`; None: where the model computes."""
        if self.stream is None:
            return None
        return (torch.cuda.current_stream(self.device) if stream is None else stream).record_event()

    def _wait(self, copied: Copied | None) -> None:
        """The model waits for a copy; this thread until what comes from a file is queued too."""
        assert copied is not None
        begin = time.perf_counter()
        events = [copied.event] if copied.arrival is None else [copied.event, *copied.arrival.queued()]
        self.waited += time.perf_counter() - begin
        for event in events:
            if event is not None:
                torch.cuda.current_stream(self.device).wait_event(event)

    def _note_reading(self) -> None:
        if self.reader.bytes:
            log.info("%.1f GiB were read from files; blocks waited for %.1f s", self.reader.bytes / GIB, self.waited)
        self.reader.bytes, self.waited = 0, 0.0

    def _copies_wait(self, event: Any) -> None:
        if event is not None and self.stream is not None:
            self.stream.wait_event(event)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Weights are plain tensors in any mode of the caller: a compiler sees tensors of inference mode as others."""
        with torch.inference_mode(False), torch.no_grad():
            yield

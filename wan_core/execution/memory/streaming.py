"""Device memory in which models take turns, and blocks that stream through it.

A `Stage` holds what a transformer needs on the device: its rest and so many blocks stay, the others come through two
slots, one copied while the other computes: at 55 GB/s, 13 ms for an A14B block in bf16, which computes for 55 ms at
480p. Experts take turns: the blocks of the next one replace those that stay, and its first forward waits for each as it
comes to it. The loop over the blocks tells its `weights`, the stage, which one comes next. A text encoder goes through
a stage of its own. On a CPU the same happens with plain copies and without waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wan_core.execution.memory.file_reader import Arrival, FileReader
from wan_core.execution.memory.host_weights import HostWeights, Unit
from wan_core.models.block_weights import BlockWeights

SLOTS = 2
REST = 0  # the unit of what belongs to no block; block i is unit i + 1


@dataclass(eq=False)
class Slot:
    """Memory of one streamed block. `holds`: whose, which unit, and whether all of it or only what a prompt needs."""

    memory: Tensor
    copied: Any = None  # event: the copy has ended
    arrival: Arrival | None = None  # of what comes from a file
    used: Any = None  # event: the block that was computed with it has ended
    holds: tuple[HostWeights, int, bool] | None = None


@dataclass(eq=False)
class ResidentUnit:
    """Memory of a resident unit. `text` and `rest`: events after the copies of what a prompt needs, and of the rest."""

    memory: Tensor
    text: Any = None
    rest: Any = None
    arrivals: tuple[Arrival | None, Arrival | None] = (None, None)  # of what comes from a file: text, rest
    holds: HostWeights | None = None


def spread(blocks: int, resident: int) -> list[int]:
    """Which of `blocks` blocks stream when `resident` stay: evenly apart, so that each copy has as long as possible."""
    streamed = max(0, blocks - resident)
    return [(2 * i + 1) * blocks // (2 * streamed) for i in range(streamed)]


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
        self.reader = FileReader(device)
        self.kept: dict[int, ResidentUnit] = {}
        self.slots: list[Slot] = []
        self.streamed: list[int] = []  # units
        self.latest: Slot | None = None  # the slot that was entered last
        self.current: HostWeights | None = None

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
        held = [slot.holds and slot.holds[0] for slot in self.slots] + [unit.holds for unit in self.kept.values()]
        return self.current is weights or any(one is weights for one in held)

    def use(self, weights: HostWeights) -> None:
        """Make the model of `weights` ready; another's leaves. Waits for nothing on the host. Raises what an allocation
        raises, with nothing left on the device."""
        with self._quietly():
            if self.current is not None and self.current is not weights:
                self.current.point_to_host()
            self.current = weights
            if self.is_empty:
                try:
                    self._allocate(weights)
                except torch.cuda.OutOfMemoryError:
                    self.leave_device()
                    raise
            self._copies_wait(self._mark())
            lacking = [unit for unit, slot in self.kept.items() if slot.holds is not weights]
            for unit in lacking:
                self._fill(unit, weights, text=True)
            for unit in lacking:
                self._fill(unit, weights, text=False)
            for unit, slot in self.kept.items():
                weights.units[unit].bind(slot.memory)
            self._wait(self.kept[REST].rest, self.kept[REST].arrivals[1])

    def leave_device(self) -> None:
        with self._quietly():
            for slot in (*self.slots, *self.kept.values()):  # memory may be given to others only after copies into it
                self._stop_reading(slot)
            if self.stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(self.stream)
            if self.current is not None:
                self.current.point_to_host()
            self.kept.clear()
            self.slots.clear()
            self.current = self.latest = None

    # --------------------------------------------------------------------------------------- while the blocks run

    def enter(self, block: int, *, text: bool = False) -> None:
        """Have the weights of `block` there, or only those that a prompt needs, and have the next ones copied."""
        weights, unit = self.current, block + 1
        assert weights is not None, "blocks of a model that is not in use"
        if unit in self.kept:
            kept = self.kept[unit]
            self._wait(kept.text, kept.arrivals[0])
            if not text:
                self._wait(kept.rest, kept.arrivals[1])
            return
        with self._quietly():
            slot = self._find(weights, unit, whole=not text) or self._load(weights, unit, whole=not text)
            self.latest = slot
            self._wait(slot.copied, slot.arrival)
            weights.units[unit].bind(slot.memory)
            at = self.streamed.index(unit) + 1
            wraps = at == len(self.streamed)
            following, whole = self.streamed[at % len(self.streamed)], wraps or not text
            if self._find(weights, following, whole) is None:
                self._load(weights, following, whole)

    def leave(self, block: int) -> None:
        """What `block` computes has been launched."""
        if block + 1 not in self.kept and self.latest is not None:
            self.latest.used = self._mark(self.latest.used)

    def _find(self, weights: HostWeights, unit: int, whole: bool) -> Slot | None:
        return next((s for s in self.slots if s.holds in ((weights, unit, True), (weights, unit, whole))), None)

    def _load(self, weights: HostWeights, unit: int, whole: bool) -> Slot:
        """Copy a streamed block into the slot that was entered longest ago."""
        slot = next(slot for slot in self.slots if slot is not self.latest)
        layout = weights.units[unit].layout
        self._stop_reading(slot)
        self._copies_wait(slot.used)
        slot.holds = (weights, unit, whole)
        slot.arrival = self._copy(weights.units[unit], slot.memory, 0, layout.nbytes if whole else layout.text_bytes)
        slot.copied = self._mark(slot.copied, self.stream)
        return slot

    def _fill(self, unit: int, weights: HostWeights, *, text: bool) -> None:
        slot, layout = self.kept[unit], weights.units[unit].layout
        if text:
            self._stop_reading(slot)
        start, stop = (0, layout.text_bytes) if text else (layout.text_bytes, layout.nbytes)
        arrival = self._copy(weights.units[unit], slot.memory, start, stop)
        if text:
            slot.holds, slot.text, slot.arrivals = None, self._mark(slot.text, self.stream), (arrival, None)
        else:
            slot.holds, slot.rest = weights, self._mark(slot.rest, self.stream)
            slot.arrivals = slot.arrivals[0], arrival

    def _copy(self, unit: Unit, memory: Tensor, start: int, stop: int) -> Arrival | None:
        """Queue the copy of bytes start..stop of a unit, and have what is in its file read."""
        stretches = unit.in_file(start, stop)
        ready = self._mark(None, self.stream) if stretches else None
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            unit.copy_to(memory, start, stop)
        return self.reader.read(stretches, memory, ready) if stretches else None

    def _stop_reading(self, slot: Slot | ResidentUnit) -> None:
        """What is read into its memory for others ends, before it is written again."""
        for arrival in (slot.arrival,) if isinstance(slot, Slot) else slot.arrivals:
            for event in () if arrival is None else arrival.cancel():
                self._copies_wait(event)
        if isinstance(slot, Slot):
            slot.arrival = None
        else:
            slot.arrivals = (None, None)

    def _allocate(self, weights: HostWeights) -> None:
        sizes = [unit.layout.nbytes for unit in weights.units]
        blocks = len(sizes) - 1
        resident = blocks if self.resident is None else min(self.resident, blocks)
        self.streamed = [i + 1 for i in spread(blocks, resident)]
        largest = max((sizes[unit] for unit in self.streamed), default=0)
        for unit, nbytes in enumerate(sizes):
            if unit not in self.streamed:
                self.kept[unit] = ResidentUnit(self._empty(nbytes))
        self.slots = [Slot(self._empty(largest)) for _ in range(SLOTS if self.streamed else 0)]

    def _empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    # ------------------------------------------------------------------------------------------ streams and events

    def _mark(self, event: Any = None, stream: Any = None) -> Any:
        """An event (`event` again, if given) at what was queued on `stream` (None: where the model computes)."""
        if self.stream is None:
            return None
        event = torch.cuda.Event() if event is None else event
        event.record(torch.cuda.current_stream(self.device) if stream is None else stream)
        return event

    def _wait(self, event: Any, arrival: Arrival | None = None) -> None:
        """The model waits for a copy; this thread until what comes from a file is queued too."""
        for one in (event, *(() if arrival is None else arrival.queued())):
            if one is not None:
                torch.cuda.current_stream(self.device).wait_event(one)

    def _copies_wait(self, event: Any) -> None:
        if event is not None and self.stream is not None:
            self.stream.wait_event(event)

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Weights are plain tensors in any mode of the caller: a compiler sees tensors of inference mode as others."""
        with torch.inference_mode(False), torch.no_grad():
            yield

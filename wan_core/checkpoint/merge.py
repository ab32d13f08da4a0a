"""Merges LoRAs into weights while the weights are read, before they are quantised, so that a step costs no more."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wan_core.checkpoint.lora.change import Change
from wan_core.ops.kernels.formats import Quantized, spread_scale
from wan_core.ops.quant.packed import Packed


@dataclass(frozen=True)
class Merge:
    """`changes`: official parameter name -> changes with their strengths, in order. `device`: where the sums are
    computed, in float32; a GPU needs a second, a CPU a minute. `attention`: the preferences of these files, which take
    the place of the model's (`attention_preferences`)."""

    changes: Mapping[str, tuple[tuple[Change, float], ...]]
    device: torch.device
    attention: Mapping[str, bytes] = field(default_factory=dict)

    @torch.no_grad()
    def apply(
        self, values: Iterable[tuple[str, Any]], encoded: Collection[str], order: Iterable[str]
    ) -> Iterator[tuple[str, Any]]:
        """(official name, value) pairs with the changes added. The weights of the linears `encoded` stay float32, so
        that they are rounded only once; others keep their dtype. Sums go where the values are; those of packed ones, in
        float32 several times as large, stay where they are computed. order: the names in the order of `values`."""
        with Ahead({name: self.changes[name] for name in order if name in self.changes}, self.device) as ahead:
            for name, value in values:
                if name not in self.changes:
                    yield name, value
                    continue
                device = self.device if isinstance(value, Packed) else _device_of(value)
                total = dense(value, self.device)
                for change, strength in ahead.take(name):
                    total = change.apply(total, strength)
                if isinstance(value, Tensor) and name.removesuffix(".weight") not in encoded:
                    total = total.to(value.dtype)
                yield name, total.to(device)


AHEAD = 1 << 28  # most bytes of changes that are copied to the GPU before they are needed
# Most bytes that travel together through pinned memory, which torch gives in powers of two and keeps. Together, because
# every call of the thread that copies them may wait for the GIL.
BATCH = 1 << 26
ALIGNED = 16  # bytes, for the views of a batch


class Ahead:
    """Copies changes to a GPU in a thread while their weights are read, because a LoRA's tensors are mapped and a copy
    from the file blocks. About `AHEAD` bytes of device memory are used: files with full differences are as large as the
    model. changes: in the order in which `take` asks for them. Those that are in a GPU's memory stay where they are."""

    def __init__(self, changes: Mapping[str, tuple[tuple[Change, float], ...]], device: torch.device) -> None:
        self.changes, self.device = changes, device
        self.moving: dict[str, Future[Any]] = {}
        self.waiting: deque[list[str]] = deque()
        self.bytes_ahead = 0
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.pool = ThreadPoolExecutor(1, thread_name_prefix="lora")
            self.waiting = _batches({name: listed for name, listed in changes.items() if _on_host(listed)})
            self._start_copies()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.pool.shutdown(cancel_futures=True)
        self.moving.clear()

    def _start_copies(self) -> None:
        """Start the next copies, up to `AHEAD` bytes; a larger batch is copied alone."""
        while self.waiting:
            nbytes = sum(_bytes(self.changes[name]) for name in self.waiting[0])
            if self.moving and self.bytes_ahead + nbytes > AHEAD:
                return
            self.bytes_ahead += nbytes
            names = self.waiting.popleft()
            self.moving |= dict.fromkeys(names, self.pool.submit(self._move, names))

    def take(self, name: str) -> tuple[tuple[Change, float], ...]:
        """The changes of one parameter, on the GPU if they are already copied or on their way."""
        if name not in self.moving:
            for batch in self.waiting:
                batch[:] = [other for other in batch if other != name]
            return self.changes[name]
        moved, event = self.moving.pop(name).result()
        self.bytes_ahead -= _bytes(moved[name])
        self._start_copies()
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        for tensor in _factors(moved[name]):
            tensor.record_stream(stream)  # allocated on the other stream, which must not reuse the memory yet
        return moved[name]

    @torch.no_grad()
    def _move(self, names: Sequence[str]) -> tuple[dict[str, tuple[tuple[Change, float], ...]], Any]:
        """Through one pinned buffer, which torch uses again for the next batch but one; what is larger than `BATCH`
        without one."""
        factors = [factor for name in names for factor in _factors(self.changes[name])]
        sizes = [_padded(factor) for factor in factors]
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            if sum(sizes) > BATCH:
                parts = (factor.contiguous().flatten().view(torch.uint8).to(self.device) for factor in factors)
            else:
                pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
                for part, factor in zip(pinned.split(sizes), factors, strict=True):
                    part[: factor.nbytes].view(factor.dtype).view(factor.shape).copy_(factor)
                parts = iter(pinned.to(self.device, non_blocking=True).split(sizes))
            moved = {name: tuple((_placed(change, parts), k) for change, k in self.changes[name]) for name in names}
            event = torch.cuda.Event()
            event.record(self.stream)
        return moved, event


def _batches(changes: Mapping[str, tuple[tuple[Change, float], ...]]) -> deque[list[str]]:
    """Names whose changes have at most `BATCH` bytes together; larger ones alone."""
    batches: deque[list[str]] = deque()
    room = 0
    for name, listed in changes.items():
        if not batches or _bytes(listed) > room:
            batches.append([])
            room = BATCH
        batches[-1].append(name)
        room -= _bytes(listed)
    return batches


def _placed(change: Change, parts: Iterator[Tensor]) -> Change:
    """`change` with its factors in the next of `parts`, which are bytes."""
    there = (next(parts)[: old.nbytes].view(old.dtype).view(old.shape) for old in change.factors)
    return replace(change, factors=tuple(there))


def _factors(changes: tuple[tuple[Change, float], ...]) -> Iterator[Tensor]:
    return (factor for change, _ in changes for factor in change.factors)


def _bytes(changes: tuple[tuple[Change, float], ...]) -> int:
    return sum(map(_padded, _factors(changes)))


def _padded(factor: Tensor) -> int:
    """Bytes of a factor in a batch."""
    return -(-factor.nbytes // ALIGNED) * ALIGNED


def _on_host(changes: tuple[tuple[Change, float], ...]) -> bool:
    return all(factor.device.type == "cpu" for factor in _factors(changes))


def _device_of(value: Tensor | Quantized) -> torch.device:
    return value.data.device if isinstance(value, Quantized) else value.device


def dense(value: Any, device: torch.device) -> Tensor:
    """A stored value (a tensor, scaled FP8 or packed) as a new float32 tensor on `device`."""
    if isinstance(value, Quantized):
        data, scale = value.data.to(device).to(torch.float32, copy=True), value.scale.to(device)
        return data.mul_(spread_scale(scale, data.shape))
    if isinstance(value, Packed):
        return value.to(device).dequantize(torch.float32)
    return value.to(device, torch.float32, copy=True)

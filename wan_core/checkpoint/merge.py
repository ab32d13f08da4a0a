"""Merges LoRAs into weights while the weights are read, before they are quantised, so that a step costs no more."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wan_core.checkpoint.lora.change import Change
from wan_core.ops.kernels.formats import Quantized, spread_scale
from wan_core.ops.quant.packed import Packed


@dataclass(frozen=True)
class Merge:
    """`changes`: official parameter name -> changes with their strengths, in order. `device`: where the sums are
    computed, in float32; a GPU needs a second, a CPU a minute."""

    changes: Mapping[str, tuple[tuple[Change, float], ...]]
    device: torch.device

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


class Ahead:
    """Copies changes to a GPU in a thread while their weights are read, because a LoRA's tensors are mapped and a copy
    from the file blocks. At most `AHEAD` bytes of device memory are used: files with full differences are as large as
    the model. changes: in the order in which `take` asks for them; changes that are not yet copied come from the
    file."""

    def __init__(self, changes: Mapping[str, tuple[tuple[Change, float], ...]], device: torch.device) -> None:
        self.changes, self.device = changes, device
        self.moving: dict[str, Future[Any]] = {}
        self.waiting: dict[str, int] = {}  # bytes
        self.bytes_ahead = 0
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.pool = ThreadPoolExecutor(1, thread_name_prefix="lora")
            self.waiting = {name: _bytes(listed) for name, listed in changes.items()}
            self._start_copies()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.pool.shutdown(cancel_futures=True)
        self.moving.clear()

    def _start_copies(self) -> None:
        """Start the next copies, up to `AHEAD` bytes; a larger one is copied alone."""
        while self.waiting:
            name, nbytes = next(iter(self.waiting.items()))
            if self.moving and self.bytes_ahead + nbytes > AHEAD:
                return
            del self.waiting[name]
            self.bytes_ahead += nbytes
            self.moving[name] = self.pool.submit(self._move, self.changes[name])

    def take(self, name: str) -> tuple[tuple[Change, float], ...]:
        """The changes of one parameter, on the GPU if they are already copied."""
        if name not in self.moving:
            self.waiting.pop(name, None)
            return self.changes[name]
        changes, event = self.moving.pop(name).result()
        self.bytes_ahead -= _bytes(changes)
        self._start_copies()
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        for tensor in (factor for change, _ in changes for factor in change.factors):
            tensor.record_stream(stream)  # allocated on the other stream, which must not reuse the memory yet
        return changes

    @torch.no_grad()
    def _move(self, changes: tuple[tuple[Change, float], ...]) -> tuple[tuple[tuple[Change, float], ...], Any]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            moved = tuple(
                (replace(change, factors=tuple(factor.to(self.device) for factor in change.factors)), strength)
                for change, strength in changes
            )
            event = torch.cuda.Event()
            event.record(self.stream)
        return moved, event


def _bytes(changes: tuple[tuple[Change, float], ...]) -> int:
    return sum(factor.nbytes for change, _ in changes for factor in change.factors)


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

"""Changes summed into weights while they are read, before they are quantised: a model with a LoRA that costs nothing
while it runs."""

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
    """`changes`: official parameter name -> changes with their strengths, in order. `device`: where the sums are made,
    in float32; a GPU does in a second what takes a CPU a minute."""

    changes: Mapping[str, tuple[tuple[Change, float], ...]]
    device: torch.device

    @torch.no_grad()
    def apply(
        self, values: Iterable[tuple[str, Any]], encoded: Collection[str], order: Iterable[str]
    ) -> Iterator[tuple[str, Any]]:
        """(official name, value) pairs with the changes summed in. The weights of the linears `encoded` stay float32,
        so that they are rounded once; others get their dtype back. order: names as they come."""
        with Ahead({name: self.changes[name] for name in order if name in self.changes}, self.device) as ahead:
            for name, value in values:
                if name not in self.changes:
                    yield name, value
                    continue
                home = _home(value)
                total = dense(value, self.device)
                for change, strength in ahead.take(name):
                    total = change.apply(total, strength)
                keep = name.removesuffix(".weight") in encoded or not isinstance(value, Tensor)
                yield name, total.to(home) if keep else total.to(value.dtype).to(home)


AHEAD = 1 << 28  # bytes of changes that may be on a GPU, or on their way, before they are taken


class Ahead:
    """Brings changes to a GPU in a thread, while the weights that they belong to are read: a LoRA's tensors lie in the
    pages of its file, and a copy from there holds up whoever asks for it. `AHEAD` bytes of device memory: files with
    differences in full are as large as the model. changes: in the order in which they are asked for; what comes before
    its turn comes from its file."""

    def __init__(self, changes: Mapping[str, tuple[tuple[Change, float], ...]], device: torch.device) -> None:
        self.changes, self.device = changes, device
        self.moving: dict[str, Future[Any]] = {}
        self.waiting: dict[str, int] = {}  # bytes
        self.bytes_ahead = 0
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.pool = ThreadPoolExecutor(1, thread_name_prefix="lora")
            self.waiting = {name: _bytes(several) for name, several in changes.items()}
            self._go_on()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.pool.shutdown(cancel_futures=True)
        self.moving.clear()

    def _go_on(self) -> None:
        """Have the next brought, as far as there may be; one that is larger alone."""
        while self.waiting:
            name, nbytes = next(iter(self.waiting.items()))
            if self.moving and self.bytes_ahead + nbytes > AHEAD:
                return
            del self.waiting[name]
            self.bytes_ahead += nbytes
            self.moving[name] = self.pool.submit(self._move, self.changes[name])

    def take(self, name: str) -> tuple[tuple[Change, float], ...]:
        """The changes of one parameter, where they are summed in."""
        if name not in self.moving:
            self.waiting.pop(name, None)
            return self.changes[name]
        several, event = self.moving.pop(name).result()
        self.bytes_ahead -= _bytes(several)
        self._go_on()
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        for tensor in (factor for change, _ in several for factor in change.factors):
            tensor.record_stream(stream)  # the memory is the other stream's, which may want it again
        return several

    @torch.no_grad()
    def _move(self, several: tuple[tuple[Change, float], ...]) -> tuple[tuple[tuple[Change, float], ...], Any]:
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            moved = tuple(
                (replace(change, factors=tuple(factor.to(self.device) for factor in change.factors)), strength)
                for change, strength in several
            )
            event = torch.cuda.Event()
            event.record(self.stream)
        return moved, event


def _bytes(several: tuple[tuple[Change, float], ...]) -> int:
    return sum(factor.nbytes for change, _ in several for factor in change.factors)


def _home(value: Any) -> torch.device:
    if isinstance(value, Packed):
        return next(iter(value.parts.values())).device
    return value.data.device if isinstance(value, Quantized) else value.device


def dense(value: Any, device: torch.device) -> Tensor:
    """A stored value, a tensor, FP8 with scales or packed, as float32 numbers on `device`, in memory of its own."""
    if isinstance(value, Quantized):
        data, scale = value.data.to(device), value.scale.to(device)
        return data.float() * spread_scale(scale, data.shape)
    if isinstance(value, Packed):
        return value.to(device).dequantize(torch.float32)
    return value.to(device, torch.float32, copy=True)

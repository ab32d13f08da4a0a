"""Where the keys and values of a driving video are kept between steps: on the device, or in host memory.

They take as much as the weights or more: 25 GiB for 81 frames at 832x480 in bf16. From host memory each layer's are
copied while the layer before computes, into one of two places on the device. The numbers are the same either way.

Legend: B videos, M driving tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

PER_TOKEN = 10.05 * 2  # bytes of activations of a forward, over tokens * dim, at most
RESERVE = 2**30
Pair = tuple[Tensor, Tensor]


class DeviceLayers:
    """Keys and values [B, M, H, D] of every layer, where the model computes."""

    def __init__(self, layers: Sequence[Pair]) -> None:
        self.layers = layers

    @property
    def videos(self) -> int:
        return len(self.layers[0][0])

    def rows(self, start: int, stop: int) -> DeviceLayers:
        return DeviceLayers([(k[start:stop], v[start:stop]) for k, v in self.layers])

    def at(self, layer: int) -> Pair:
        """Of one layer, for work on the current stream."""
        return self.layers[layer]


class HostLayers:
    """The same in pinned host memory. `at` is called for one layer after another."""

    def __init__(self, layers: Sequence[Pair], device: torch.device, rows: slice = slice(None)) -> None:
        self.layers, self.device, self.some = layers, device, rows
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.places: list[Tensor] = []  # two of [2, B, M, H, D]
        self.there: list[int | None] = [None, None]  # which layer is in a place, or on its way
        self.used = 0  # the place that was given last

    @property
    def videos(self) -> int:
        return len(self.layers[0][0][self.some])

    def rows(self, start: int, stop: int) -> HostLayers:
        if (start, stop) == (0, self.videos):
            return self
        return HostLayers(self.layers, self.device, slice(start, stop))

    def at(self, layer: int) -> Pair:
        free = 1 - self.used
        if self.there[free] != layer:
            self._copy(layer, free)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        found, self.used = self.places[free], free
        # The other place is that of the layer before, whose work has been launched.
        self._copy((layer + 1) % len(self.layers), 1 - free)
        return found[0], found[1]

    def _copy(self, layer: int, place: int) -> None:
        """Start copying a layer into a place, once what reads that place now has computed."""
        k, v = (x[self.some] for x in self.layers[layer])
        if not self.places:
            self.places = [torch.empty(2, *k.shape, dtype=k.dtype, device=self.device) for _ in range(2)]
        self.there[place] = layer
        if self.stream is None:
            self.places[place].copy_(torch.stack([k, v]))
            return
        self.places[place].record_stream(self.stream)  # freed only when nothing is on its way to it
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self.places[place][0].copy_(k, non_blocking=True)
            self.places[place][1].copy_(v, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """x in pinned memory, copied without making the host wait. Work on the current stream finds it there."""
    kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return kept.copy_(x, non_blocking=True)


def fits(nbytes: int, tokens: int, dim: int, device: torch.device) -> bool:
    """Whether so many bytes fit on the device beside a forward of `tokens` tokens. On a CPU they do."""
    if device.type != "cuda":
        return True
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    room = free + torch.cuda.memory_reserved(device) - allocated
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated
    return nbytes + int(PER_TOKEN * tokens * dim) + RESERVE <= min(room, limit)

"""How the keys and values of a driving video are kept between steps: on the device or in host memory, as they are or
in FP8.

They take as much as the weights or more: 25 GiB for 81 frames at 832x480 in bf16. From host memory each layer's are
copied while the layer before computes, into one of two places on the device; the numbers are the same either way. In
FP8, with a scale for each token and head, they take half, and differ by about 3 %.

Legend: B videos, M driving tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wan_core.config.host_memory import available_bytes

PER_TOKEN = 10.05 * 2  # bytes of activations of a forward, over tokens * dim, at most
RESERVE = 2**30
HOST_RESERVE = 4 * 2**30  # that other programs need
FP8_SHARE = 0.52  # of bf16: a byte for two, and a scale for each head
FP8_MAX = 448.0
Layer = tuple[Tensor, ...]  # keys and values [B, M, H, D]; or of each the numbers and their scales


class Form(NamedTuple):
    """How they are kept."""

    on_host: bool = False
    fp8: bool = False

    def words(self) -> str:
        return f"{'FP8' if self.fp8 else 'as computed'}, {'in host memory' if self.on_host else 'on the device'}"


# Best first: what changes no number, then what does.
FORMS = (Form(), Form(on_host=True), Form(fp8=True), Form(on_host=True, fp8=True))


@dataclass(frozen=True)
class Packed:
    """Numbers [B, M, H, D] as e4m3, with a float32 scale [B, M, H, 1] for each token and head."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def __getitem__(self, index: tuple[slice, slice]) -> Tensor:
        """The numbers of some videos and tokens."""
        return self.data[index].float() * self.scale[index]


Kept = Tensor | Packed


def pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as e4m3, and the scales of `Packed`."""
    scale = (x.abs().amax(-1, keepdim=True).float() / FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def as_pair(layer: Layer) -> tuple[Kept, Kept]:
    """Keys and values."""
    if len(layer) == 2:
        return layer[0], layer[1]
    return Packed(layer[0], layer[1]), Packed(layer[2], layer[3])


def kept_layer(k: Tensor, v: Tensor, form: Form) -> Layer:
    """Of keys and values [B, M, H, D] of one layer. Work on the current stream finds them there."""
    layer = (*pack(k), *pack(v)) if form.fp8 else (k.contiguous(), v.contiguous())
    return tuple(to_host(one) for one in layer) if form.on_host else layer


class DeviceLayers:
    """Keys and values of every layer, where the model computes."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers

    @property
    def videos(self) -> int:
        return len(self.layers[0][0])

    def rows(self, start: int, stop: int) -> DeviceLayers:
        return DeviceLayers([tuple(one[start:stop] for one in layer) for layer in self.layers])

    def at(self, layer: int) -> tuple[Kept, Kept]:
        """Of one layer, for work on the current stream."""
        return as_pair(self.layers[layer])


class HostLayers:
    """The same in pinned host memory. `at` is called for one layer after another."""

    def __init__(self, layers: Sequence[Layer], device: torch.device, rows: slice = slice(None)) -> None:
        self.layers, self.device, self.some = layers, device, rows
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.places: list[Layer] = []  # two, on the device
        self.there: list[int | None] = [None, None]  # which layer is in a place, or on its way
        self.used = 0  # the place that was given last

    @property
    def videos(self) -> int:
        return len(self.layers[0][0][self.some])

    def rows(self, start: int, stop: int) -> HostLayers:
        if (start, stop) == (0, self.videos):
            return self
        return HostLayers(self.layers, self.device, slice(start, stop))

    def at(self, layer: int) -> tuple[Kept, Kept]:
        free = 1 - self.used
        if self.there[free] != layer:
            self._copy(layer, free)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        found, self.used = self.places[free], free
        # The other place is that of the layer before, whose work has been launched.
        self._copy((layer + 1) % len(self.layers), 1 - free)
        return as_pair(found)

    def _copy(self, layer: int, place: int) -> None:
        """Start copying a layer into a place, once what reads that place now has computed."""
        given = tuple(one[self.some] for one in self.layers[layer])
        if not self.places:
            self.places = [tuple(torch.empty_like(one, device=self.device) for one in given) for _ in range(2)]
        self.there[place] = layer
        if self.stream is None:
            for target, one in zip(self.places[place], given, strict=True):
                target.copy_(one)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for target, one in zip(self.places[place], given, strict=True):
                target.record_stream(self.stream)  # freed only when nothing is on its way to it
                target.copy_(one, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """x in pinned memory, copied without making the host wait. Work on the current stream finds it there."""
    kept = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return kept.copy_(x, non_blocking=True)


def choose_form(nbytes: int, layers: int, tokens: int, dim: int, device: torch.device) -> Form:
    """The first of FORMS that fits, for so many bytes in all layers beside a forward of `tokens` tokens; the last where
    none does. On a CPU the first."""
    if device.type != "cuda":
        return FORMS[0]
    sizes = {False: nbytes, True: int(nbytes * FP8_SHARE)}
    for form in FORMS:
        if form.on_host:
            # torch's pinned memory comes in powers of two, for the keys and for the values of each layer.
            each = 1 << (sizes[form.fp8] // (2 * layers) - 1).bit_length()
            free = available_bytes()
            if free is None or each * 2 * layers + HOST_RESERVE <= free:
                return form
        elif fits(sizes[form.fp8], tokens, dim, device):
            return form
    return FORMS[-1]


def fits(nbytes: int, tokens: int, dim: int, device: torch.device) -> bool:
    """Whether so many bytes fit on the device beside a forward of `tokens` tokens."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    room = free + torch.cuda.memory_reserved(device) - allocated
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated
    return nbytes + int(PER_TOKEN * tokens * dim) + RESERVE <= min(room, limit)

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

import torch
from torch import Tensor

from wan_core.config.host_memory import HOST_RESERVE, available_bytes
from wan_core.models.wan.config import TORCH_PER_TOKEN, PreparedForm
from wan_core.models.wan.families.animate2 import MORE_PER_TOKEN, PLACES, Form

PER_TOKEN = 2 * (TORCH_PER_TOKEN + MORE_PER_TOKEN)  # bytes of a forward over tokens * dim, where no plan says them
RESERVE = 2**29  # at most what a memory plan keeps free
FP8_MAX = 448.0
Layer = tuple[Tensor, ...]  # keys and values [B, M, H, D]; or of each the numbers and their scales


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
    """Keys and values [B, M, H, D] of one layer in `form`, ready for work on the current stream."""
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
        """Keys and values of one layer, ready for work on the current stream."""
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
            self.places = [tuple(torch.empty_like(one, device=self.device) for one in given) for _ in range(PLACES)]
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
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return pinned.copy_(x, non_blocking=True)


def choose_form(
    forms: Sequence[PreparedForm], planned: PreparedForm | None, tokens: int, dim: int, device: torch.device
) -> Form:
    """The first of `forms` that fits, from the planned one on; the last where none does. On a CPU all fit.

    A form in host memory that was planned is taken: the plan has counted that memory, and a clip before may have left
    its own to be used again. planned: None where there is no plan; then it must fit beside a forward of `tokens`
    tokens."""
    begin = 0 if planned is None else [one.form for one in forms].index(planned.form)
    activations = int(PER_TOKEN * tokens * dim) if planned is None else planned.activations
    for one in forms[begin:]:
        if device.type != "cuda":
            return one.form
        if one.host:
            free = available_bytes()
            counted = planned is not None and one.form == planned.form
            if counted or free is None or one.host + HOST_RESERVE <= free:
                return one.form
        elif one.device + activations + RESERVE <= free_on(device):
            return one.form
    return forms[-1].form


def free_on(device: torch.device) -> int:
    """Bytes that this process may still take on a GPU."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    room = free + torch.cuda.memory_reserved(device) - allocated
    return min(room, int(torch.cuda.get_per_process_memory_fraction(device) * total) - allocated)

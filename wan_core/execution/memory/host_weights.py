"""A model's weights in host memory, in pieces that travel to the device as one.

A *unit* is a set of tensors that lie one behind the other in one piece of memory, so that one copy moves all of them. A
transformer and a text encoder have one for every block and one for the rest; any other model is a single unit. Each
tensor of the module points either to its place in host memory or to the same place in a copy of the unit on the device.

The matrices of attached LoRAs belong to no unit. They are small and stay on the device, so that other LoRAs change no
layout.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wan_core.execution.memory.file_reader import MappedFiles, Stretch, changed_pages, read_now
from wan_core.execution.memory.pinned_memory import PinnedMemory
from wan_core.models.text.umt5 import TextEncoder
from wan_core.models.wan.model import WanModel
from wan_core.ops.quant.linear import is_attached

ALIGNMENT = 256  # bytes: what torch's own allocations have, and more than any kernel asks for
THREADS = 8
GOLDEN = (5**0.5 - 1) / 2
# What a prompt's keys and values need of a block. It stands first in the block's unit, and can be copied by itself.
_TEXT = re.compile(r"(vace_)?blocks\.\d+\.cross_attn\.(k|v|norm_k)(_img)?\.")


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in its unit, and how."""

    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, flat: Tensor) -> Tensor:
        """The tensor in a copy of its unit, uint8."""
        return flat[self.offset : self.offset + self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Layout:
    """The layout of a unit in one buffer. A prompt needs only the first `text_bytes`."""

    places: tuple[Place, ...]
    nbytes: int
    text_bytes: int


class Unit:
    """Tensors of a module, by name, with their layout and their values on the host."""

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        pairs = sorted(zip(names, tensors, strict=True), key=lambda pair: _TEXT.match(pair[0]) is None)
        self.tensors = [tensor for _, tensor in pairs]
        places, end, text_bytes = [], 0, 0
        for name, tensor in pairs:
            stride = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
            places.append(Place(end, tensor.nbytes, tuple(tensor.shape), tuple(stride), tensor.dtype))
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            text_bytes = end if _TEXT.match(name) else text_bytes
        self.layout = Layout(tuple(places), end, text_bytes)
        self.memory: PinnedMemory | None = None  # None: the tensors stay where they were
        self.stretches: list[Stretch] = []  # of those whose values are read from a file
        self.home: list[Tensor] = []
        self.at: Tensor | None = None  # the copy on the device that the tensors point to

    def take(self, lock: bool, copy: bool, files: MappedFiles) -> None:
        """Copy the values into memory of its own, or (not `copy`) use them where they are, in a file if one of `files`
        has them; frees one tensor at a time."""
        if copy:
            self.memory = PinnedMemory(self.layout.nbytes)
        with torch.inference_mode(False), torch.no_grad():
            for tensor, place in zip(self.tensors, self.layout.places, strict=True):
                found = files.find(tensor) if _is_dense(tensor) else None
                if found is not None:
                    self.stretches.append(Stretch(*found, place.offset, place.nbytes))
                if self.memory is not None:
                    own = place.view(self.memory.bytes)
                    if found is None:
                        own.copy_(tensor)
                    tensor.data = own
                elif tensor.device.type != "cpu":
                    tensor.data = tensor.data.cpu()
                self.home.append(tensor.data)
        if self.memory is not None:
            read_now(self.stretches, self.memory.bytes)  # sooner than page by page
            self.stretches.clear()
        if lock and self.memory is not None:
            self.memory.lock()

    def copy_to(self, flat: Tensor, start: int, stop: int) -> None:
        """Bytes start..stop, between tensors, to their place in `flat`, on the current stream; without `in_file`."""
        if self.memory is not None:
            flat[start:stop].copy_(self.memory.bytes[start:stop], non_blocking=True)
            return
        read = {stretch.start for stretch in self.in_file(start, stop)}
        for place, own in zip(self.layout.places, self.home, strict=True):
            if start <= place.offset < stop and place.offset not in read:
                place.view(flat).copy_(own, non_blocking=True)

    def in_file(self, start: int, stop: int) -> list[Stretch]:
        """What of the bytes start..stop is to be read from a file: nothing that was changed in memory, as by a LoRA."""
        here = [stretch for stretch in self.stretches if start <= stretch.start < stop]
        own = {place.offset: home for place, home in zip(self.layout.places, self.home, strict=True)} if here else {}
        return [stretch for stretch in here if not changed_pages(own[stretch.start])]

    def bind(self, flat: Tensor | None) -> None:
        if self.at is flat:
            return
        views = self.home if flat is None else [place.view(flat) for place in self.layout.places]
        for tensor, view in zip(self.tensors, views, strict=True):
            tensor.data = view
        self.at = flat


def streaming_order(blocks: int) -> list[int]:
    """Blocks in the order in which they stream: where fewer stay on the device, others stream beside the same ones, so
    that what is pinned for them is right for every size of video. Any number of them lies about evenly apart: each
    copy has time."""
    return sorted(range(blocks), key=lambda block: block * GOLDEN % 1)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the values fill a piece of memory without holes, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class HostWeights:
    """The weights of `model` in host memory: its units, the rest first, then the blocks of a transformer or a text
    encoder.

    lock: pin the memory, so that a GPU reads it at full speed, from the context of `device` (None: the current one).
    copy: False leaves the weights where they are (a mapped file), where there is not enough memory to pin: all but
    `pinned` bytes of them, the blocks that stream first.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lock: bool,
        copy: bool = True,
        device: torch.device | None = None,
        pinned: int = 0,
    ) -> None:
        self.model = model
        named = {name: tensor for name, tensor in tensors_of(model).items() if not is_attached(name)}
        assert not any(tensor.is_inference() for tensor in named.values()), "weights made in inference mode stay there"
        groups: list[list[str]] = [list(named)]
        if isinstance(model, WanModel | TextEncoder):
            blocks = [[n for n in named if n.startswith(prefixes)] for prefixes in block_prefixes(model)]
            inside = {name for block in blocks for name in block}
            groups = [[n for n in named if n not in inside], *blocks]
        self.units = [Unit(names, [named[n] for n in names]) for names in groups]
        here = (torch.cuda.current_device() if device is None else device) if lock else None
        copied = set(self.units) if copy else self._choose(pinned)
        files = MappedFiles()

        def take(unit: Unit) -> None:  # a thread's current device is the first GPU: pinning there takes its memory
            with nullcontext() if here is None else torch.cuda.device(here):
                unit.take(lock, unit in copied, files)

        with ThreadPoolExecutor(THREADS if len(self.units) > 1 else 1) as pool:
            list(pool.map(take, self.units))

    def _choose(self, pinned: int) -> set[Unit]:
        """Units of `pinned` bytes in all: blocks before what is outside of them, which is read once for all steps."""
        outside, *blocks = self.units
        chosen = set[Unit]()
        for unit in (*(blocks[i] for i in streaming_order(len(blocks))), outside):
            if unit.layout.nbytes <= pinned:
                chosen.add(unit)
                pinned -= unit.layout.nbytes
        return chosen

    @property
    def bytes_in_files(self) -> int:
        """Bytes of weights that are read from a file whenever they are needed."""
        return sum(stretch.nbytes for unit in self.units for stretch in unit.stretches)

    @property
    def layout(self) -> tuple[Layout, ...]:
        """What two models must have in common to take turns in the same device memory."""
        return tuple(unit.layout for unit in self.units)

    @property
    def nbytes(self) -> int:
        return sum(unit.layout.nbytes for unit in self.units)

    def point_to_host(self) -> None:
        for unit in self.units:
            unit.bind(None)


def block_prefixes(model: WanModel | TextEncoder) -> list[tuple[str, ...]]:
    if isinstance(model, WanModel):
        modules = [model.config.modules_of(layer) for layer in range(len(model.blocks))]
        return [tuple(f"{name}." for name in names) for names in modules]
    return [(f"encoder.blocks.{i}.",) for i in range(len(model.encoder.blocks))]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those of attached LoRAs included."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}

"""A model's weights in host memory, in pieces that travel to the device as one.

A *unit* is a set of tensors that lie one behind the other in one piece of memory, so that one copy moves all of them. A
transformer has one for every block and one for the rest; any other model is a single unit. Each tensor of the module
points either to its place on the shelf or to the same place in a copy of the unit on the device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wan_core.execution.memory.pinned_memory import Pages
from wan_core.models.wan.model import WanModel

ALIGNMENT = 256  # bytes: what torch's own allocations have, and more than any kernel asks for
THREADS = 8
# What a prompt's keys and values need of a block. It stands first in the block's unit, and can be copied by itself.
_TEXT = re.compile(r"blocks\.\d+\.cross_attn\.(k|v|norm_k)(_img)?\.")


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
    """Of a unit: `lead` bytes at its begin are what a prompt needs."""

    places: tuple[Place, ...]
    nbytes: int
    lead: int


class Unit:
    """Tensors of a module, by name, with their layout and their values on the host."""

    def __init__(self, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
        pairs = sorted(zip(names, tensors, strict=True), key=lambda pair: _TEXT.match(pair[0]) is None)
        self.tensors = [tensor for _, tensor in pairs]
        places, end, lead = [], 0, 0
        for name, tensor in pairs:
            stride = tensor.stride() if _is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()
            nbytes = tensor.numel() * tensor.element_size()
            places.append(Place(end, nbytes, tuple(tensor.shape), tuple(stride), tensor.dtype))
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
            lead = end if _TEXT.match(name) else lead
        self.layout = Layout(tuple(places), end, lead)
        self.pages: Pages | None = None  # None: the tensors stay where they were
        self.home: list[Tensor] = []
        self.at: Tensor | None = None  # the copy on the device that the tensors point to

    def shelve(self, lock: bool, copy: bool) -> None:
        """Take the values over into pages of its own, or (not `copy`) where they are; frees one tensor at a time."""
        if copy:
            self.pages = Pages(self.layout.nbytes)
        with torch.inference_mode(False), torch.no_grad():
            for tensor, place in zip(self.tensors, self.layout.places, strict=True):
                if self.pages is not None:
                    own = place.view(self.pages.bytes)
                    own.copy_(tensor)
                    tensor.data = own
                elif tensor.device.type != "cpu":
                    tensor.data = tensor.data.cpu()
                self.home.append(tensor.data)
        if lock and self.pages is not None:
            self.pages.lock()

    def copy_to(self, flat: Tensor, start: int, stop: int) -> None:
        """Bytes start..stop, which lie between tensors, to the same place of `flat`, on the current stream."""
        if self.pages is not None:
            flat[start:stop].copy_(self.pages.bytes[start:stop], non_blocking=True)
            return
        for place, own in zip(self.layout.places, self.home, strict=True):
            if start <= place.offset < stop:
                place.view(flat).copy_(own, non_blocking=True)

    def bind(self, flat: Tensor | None) -> None:
        """Point the tensors to `flat`, or home (None)."""
        if self.at is flat:
            return
        views = self.home if flat is None else [place.view(flat) for place in self.layout.places]
        for tensor, view in zip(self.tensors, views, strict=True):
            tensor.data = view
        self.at = flat


def _is_dense(tensor: Tensor) -> bool:
    """Whether the values fill a piece of memory without holes, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


class Shelf:
    """The weights of `model`: its units, the rest first, then the blocks of a transformer.

    lock: for a GPU to read at full speed, from the context of `device` (None: the current one). copy: False leaves the
    weights where they are (a file's pages), where there is not enough memory to lock.
    """

    def __init__(self, model: nn.Module, *, lock: bool, copy: bool = True, device: torch.device | None = None) -> None:
        self.model = model
        named = tensors_of(model)
        assert not any(tensor.is_inference() for tensor in named.values()), "weights made in inference mode stay there"
        groups: list[list[str]] = [list(named)]
        if isinstance(model, WanModel):
            prefixes = [f"blocks.{i}." for i in range(len(model.blocks))]
            groups = [[n for n in named if not n.startswith("blocks.")]]
            groups += [[n for n in named if n.startswith(prefix)] for prefix in prefixes]
        self.units = [Unit(names, [named[n] for n in names]) for names in groups]
        here = (torch.cuda.current_device() if device is None else device) if lock else None

        def shelve(unit: Unit) -> None:  # threads begin on the first GPU, and locking there would take memory of it
            with nullcontext() if here is None else torch.cuda.device(here):
                unit.shelve(lock, copy)

        with ThreadPoolExecutor(THREADS if len(self.units) > 1 else 1) as pool:
            list(pool.map(shelve, self.units))

    @property
    def layout(self) -> tuple[Layout, ...]:
        """What two models must have in common to take turns in the same device memory."""
        return tuple(unit.layout for unit in self.units)

    @property
    def nbytes(self) -> int:
        return sum(unit.layout.nbytes for unit in self.units)

    def go_home(self) -> None:
        """Point every tensor to the host."""
        for unit in self.units:
            unit.bind(None)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}

"""Parallel VAE: the decoded picture is divided into strips, one for each rank. The first rank encodes.

Every layer of the decoder computes its strip of the whole picture's result. Norms need one position only. A convolution
gets the rows (or columns) beyond its edge from the neighbours just before it runs. In attention inside a frame, every
position of a strip attends to the keys of all strips. Results differ from one GPU only by rounding, because kernels get
other shapes. The longer side of the picture is divided, in whole latent cells.

Decoded frames are gathered as they are finished, so that every rank has the whole result.

Rounding would not stay small in what is encoded: sampling makes 0.046 of it (two GPUs, bf16). So the first rank encodes
the whole picture as one GPU does, and sends the latents to all.

Shapes: B batch, C channels, T/Y/X frames, rows, columns at the layer's own resolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.parallel.mesh import Group, all_to_all, even_parts, gather_parts

CHUNK = 2  # latent frames computed together: a strip has memory for two, and communication happens half as often


@dataclass(frozen=True)
class Strips:
    """Divides decoded pictures among the ranks of `group`, of which the first encodes."""

    group: Group
    chunk: int = CHUNK

    def cut(self, rows: int, columns: int) -> Strip | None:
        """This rank's strip of a picture of `rows` x `columns` latent cells; None if there are fewer than ranks."""
        axis, cells = (3, rows) if rows > columns else (4, columns)
        if cells < self.group.size:
            return None
        return Strip(self.group, axis, tuple(even_parts(cells, self.group.size)))

    def of_first(self, compute: Callable[[], Tensor], shape: tuple[int, ...], like: Tensor) -> Tensor:
        """What the first rank computes, of `shape`, on every rank, in the dtype and on the device of `like`."""
        made = compute().contiguous() if self.group.index == 0 else like.new_empty(shape)
        dist.broadcast(made, self.group.ranks[0], group=self.group.process)
        return made


@dataclass(frozen=True)
class Strip:
    """One rank's part of a picture along `axis` of [B, C, T, Y, X]; `cells` are the latent cells of every rank."""

    group: Group
    axis: int
    cells: tuple[int, ...]

    def take(self, latents: Tensor) -> Tensor:
        """This rank's strip of whole latents, a view."""
        return latents.narrow(self.axis, sum(self.cells[: self.group.index]), self.cells[self.group.index])

    def join(self, strip: Tensor, scale: int) -> Tensor:
        """The whole picture, with `scale` positions per cell, on every rank."""
        return gather_parts(strip, [count * scale for count in self.cells], self.group, self.axis)

    def widen(self, x: Tensor, more: int, outside: Tensor | None = None) -> Tensor:
        """x [..., Y, X] with so many positions of both neighbours; at the edge `outside` [C, 1, 1, 1], or zeros (None),
        as a convolution pads."""
        axis, me, last = self.axis - 5, self.group.index, self.group.size - 1
        # The previous rank gets this rank's first positions, the next rank its last ones: as many as arrive.
        first, final = x.narrow(axis, 0, more), x.narrow(axis, x.shape[axis] - more, more)
        edges = {rank: edge for rank, edge in ((me - 1, first), (me + 1, final)) if 0 <= rank <= last}
        counts = [first.numel() if rank in edges else 0 for rank in range(last + 1)]
        arrived = x.new_empty(sum(counts))
        all_to_all(arrived, torch.cat([edge.flatten() for edge in edges.values()]), counts, counts, self.group)
        sides = {rank: part.view(first.shape) for rank, part in zip(edges, arrived.split(first.numel()), strict=True)}
        edge = (x.new_zeros(1) if outside is None else outside).expand_as(first)
        return _joined([sides.get(me - 1, edge), x, sides.get(me + 1, edge)], axis)

    def padding(self, padding: tuple[int, ...]) -> tuple[int, ...]:
        """A convolution's padding (..., rows, columns), with 0 for the axis, which `widen` has extended."""
        at = self.axis - 5 + len(padding)
        return (*padding[:at], 0, *padding[at + 1 :])

    def keys(self, x: Tensor) -> Tensor:
        """[P, n, C] of this strip's positions -> [P, all n, C] of all strips'."""
        lengths = [x.shape[1] // self.cells[self.group.index] * count for count in self.cells]
        return gather_parts(x, lengths, self.group, 1)


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    """Along `axis` (negative), in the memory layout of the strip itself."""
    whole = max(parts, key=lambda part: part.shape[axis])
    video = whole.ndim == 5
    if whole.is_contiguous(memory_format=torch.channels_last_3d if video else torch.channels_last):
        # Contiguous tensors along an outer axis: whole blocks are copied
        return torch.cat([part.movedim(1, -1) for part in parts], axis - 1).movedim(-1, 1)
    return torch.cat(parts, axis)

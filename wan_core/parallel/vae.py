"""Parallel VAE: the picture is divided into strips, one for each rank.

Every layer computes its strip of the whole picture's result. Norms need one position only. A convolution gets the rows
(or columns) beyond its edge from the neighbours just before it runs. In attention inside a frame, every position of a
strip attends to the keys of all strips. Results differ from one GPU only by rounding, because kernels get other shapes.
The longer side of the picture is divided, in whole latent cells.

Decoded frames and encoded latents are gathered as they are finished, so that every rank has the whole result.

Shapes: B batch, C channels, T/Y/X frames, rows, columns at the layer's own resolution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wan_core.parallel.mesh import Group, all_to_all, even_parts, gather_parts

CHUNK = 2  # latent frames computed together: a strip has memory for two, and communication happens half as often


@dataclass(frozen=True)
class Strips:
    """Divides pictures among the ranks of `group`."""

    group: Group
    chunk: int = CHUNK

    def cut(self, rows: int, columns: int) -> Strip | None:
        """This rank's strip of a picture of `rows` x `columns` latent cells; None if there are fewer cells than
        ranks."""
        axis, cells = (3, rows) if rows > columns else (4, columns)
        if cells < self.group.size:
            return None
        return Strip(self.group, axis, tuple(even_parts(cells, self.group.size)))


@dataclass(frozen=True)
class Strip:
    """One rank's part of a picture along `axis` of [B, C, T, Y, X]; `cells` are the latent cells of every rank."""

    group: Group
    axis: int
    cells: tuple[int, ...]

    def take(self, whole: Tensor, scale: int = 1) -> Tensor:
        """This rank's strip of a whole picture with `scale` positions per cell, a view."""
        begin = sum(self.cells[: self.group.index])
        return whole.narrow(self.axis, begin * scale, self.cells[self.group.index] * scale)

    def join(self, strip: Tensor, scale: int = 1) -> Tensor:
        """The whole picture, on every rank."""
        return gather_parts(strip, [count * scale for count in self.cells], self.group, self.axis)

    def widen(self, x: Tensor, before: int, after: int) -> Tensor:
        """x [..., Y, X] with `before` and `after` positions of the neighbours on both sides; zeros at the picture's
        edge, as a convolution's padding."""
        axis, me, last = self.axis - 5, self.group.index, self.group.size - 1
        n = x.shape[axis]
        # The previous rank gets this rank's first `after` positions, the next rank its last `before` positions.
        edges = {me - 1: (0, after), me + 1: (n - before, before)}
        sends = [x.narrow(axis, *edges[r]) if r in edges and edges[r][1] else None for r in range(last + 1)]
        shape = list(x.shape)

        def size(count: int) -> int:
            shape[axis] = count
            return torch.Size(shape).numel()

        arriving = [size({me - 1: before, me + 1: after}.get(r, 0)) for r in range(last + 1)]
        leaving = [0 if part is None else part.numel() for part in sends]
        packed = torch.cat([x.new_empty(0), *(part.flatten() for part in sends if part is not None)])
        arrived = x.new_empty(sum(arriving))
        all_to_all(arrived, packed, arriving, leaving, self.group)

        def side(rank: int, count: int) -> Tensor:
            shape[axis] = count
            if not 0 <= rank <= last:
                return x.new_zeros(shape)
            begin = sum(arriving[:rank])
            return arrived[begin : begin + arriving[rank]].view(shape)

        sides = [side(me - 1, before)] if before else []
        sides += [x, *([side(me + 1, after)] if after else [])]
        return _joined(sides, axis)

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

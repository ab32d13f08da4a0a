"""The mesh cfg x ring x ulysses, as numbers (`Mesh`) and as the process groups of one rank (`RankMesh`). Or layers:
the ranks hold a part of the blocks each. Around any of them time: ranks run different steps.

Ranks are numbered with ulysses innermost and cfg outermost, so that the ranks that communicate most are on one host if
possible. The tokens of a video are divided into ring x ulysses shards, in the order of the ranks.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.config import OptionError

if TYPE_CHECKING:  # not in every build of torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Mesh:
    """The size of each dimension, as plain numbers. Raises OptionError for an impossible mesh."""

    cfg: int = 1  # 2: the guidance branches run on different ranks
    ring: int = 1  # ranks of ring attention, which pass keys and values around
    ulysses: int = 1  # ranks of Ulysses attention, which exchange tokens for heads
    layers: int = 1  # ranks of the layer pipeline, each with a part of the blocks
    time: int = 1  # ranks, or groups of ranks, that run steps of their own at the same time

    def __post_init__(self) -> None:
        if self.cfg not in (1, 2) or self.ring < 1 or self.ulysses < 1:
            raise OptionError(f"mesh {self} given; cfg must be 1 or 2, ring and ulysses at least 1, for example 2x1x4")
        if self.time < 1:
            raise OptionError(f"mesh time{self.time} given; time must be at least 1, for example time2")
        if self.layers < 1 or (self.layers > 1 and self.cfg * self.shards > 1):
            raise OptionError(f"mesh layers{self.layers} given; it stands alone, with 1 or more ranks: layers2")

    def __str__(self) -> str:
        if self.time > 1:
            inner = replace(self, time=1)
            return f"time{self.time}" + (f"+{inner}" if inner.size > 1 else "")
        if self.layers > 1:
            return f"layers{self.layers}"
        return f"{self.cfg}x{self.ring}x{self.ulysses}"

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """CFGxRINGxULYSSES, for example 2x1x4. Or layersN. Before any of them timeN+, or timeN alone. Raises
        OptionError."""
        timed = re.fullmatch(r"time(\d{1,4})(?:\+(.+))?", text.strip().lower())
        if timed is not None:
            if (timed[2] or "").startswith("time"):
                raise OptionError(f"mesh {text!r} given; time is there twice: write time2+1x1x2")
            return replace(cls.parse(timed[2]) if timed[2] else cls(), time=int(timed[1]))
        alone = re.fullmatch(r"layers(\d{1,4})", text.strip().lower())
        if alone is not None:
            return cls(layers=int(alone[1]))
        match = re.fullmatch(r"(\d{1,4})x(\d{1,4})x(\d{1,4})", text.strip().lower())
        if match is None:
            raise OptionError(
                f"mesh {text!r} given; write CFGxRINGxULYSSES (2x1x4), layers2, time4, time2+1x1x2, or auto"
            )
        return cls(int(match[1]), int(match[2]), int(match[3]))

    @property
    def size(self) -> int:
        return self.cfg * self.shards * self.layers * self.time

    @property
    def shards(self) -> int:
        return self.ring * self.ulysses

    def describe(self) -> str:
        """`8 GPUs: guidance 2 x ring 2 x ulysses 2`, without dimensions of size 1."""
        parts = [("time", self.time), ("guidance", self.cfg), ("ring", self.ring)]
        parts += [("ulysses", self.ulysses), ("layers", self.layers)]
        axes = " x ".join(f"{name} {count}" for name, count in parts if count > 1)
        return f"{self.size} GPU{'s' if self.size > 1 else ''}{': ' + axes if axes else ''}"

    def rows(self) -> dict[str, list[list[int]]]:
        """The ranks of every group, by dimension. "sequence" is ring and ulysses together."""
        grid = torch.arange(self.size).view(self.time, self.layers, self.cfg, self.ring, self.ulysses)
        axes = {"cfg": grid.permute(0, 1, 3, 4, 2), "ring": grid.mT, "ulysses": grid, "sequence": grid.flatten(3)}
        axes |= {"layers": grid.permute(0, 2, 3, 4, 1), "time": grid.permute(1, 2, 3, 4, 0)}
        return {name: ranks.flatten(0, -2).tolist() for name, ranks in axes.items()}


PAIRED = 0.9  # with a smaller share of forwards in steps with both branches, half of the ranks rests too often


def auto_mesh(gpus: int, heads: int, *, paired: float, rings: bool, gpus_per_host: int) -> Mesh:
    """The mesh that `auto` stands for (docs/parallel.md has what was measured). Guidance is shared first, whose halves
    exchange one velocity a step. The other ranks divide the tokens: by Ulysses, as far as there are heads and ranks of
    one host, and by a ring, which sends more, beyond that. A layer pipeline and parallel steps are taken by name alone.

    heads: of the model. paired: the share of forwards in steps with both branches. rings: whether attention supports a
    ring; sparse attention does not. Raises OptionError."""
    cfg = 2 if gpus % 2 == 0 and paired >= PAIRED else 1
    shards = gpus // cfg
    most = min(shards, heads, gpus_per_host if rings else shards)
    ulysses = max(size for size in range(1, most + 1) if shards % size == 0)
    if ulysses < shards and not rings:
        raise OptionError(
            f"{gpus} GPUs cannot divide a model with {heads} heads: use fewer GPUs, or an attention backend that "
            "supports a ring"
        )
    return Mesh(cfg, shards // ulysses, ulysses)


def even_parts(total: int, parts: int) -> list[int]:
    """`total` as a sum of `parts` integers that differ by at most one, the larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


@dataclass(frozen=True)
class Group:
    """Ranks that communicate, and this rank's index among them. `process` is None for a group of one rank."""

    process: ProcessGroup | None
    ranks: tuple[int, ...]
    index: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, eq=False)
class RankMesh:
    """One rank: its mesh, its device, and its group in each dimension.

    `host` are the ranks on this machine, which read files together. `control` is a group on the CPU (gloo), for flags
    that must not wait for work queued on a GPU.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    cfg: Group
    ring: Group
    ulysses: Group
    sequence: Group
    layers: Group
    time: Group
    world: Group
    host: Group
    control: ProcessGroup | None

    @property
    def shard(self) -> int:
        return self.sequence.index

    @classmethod
    def create(cls, mesh: Mesh, device: torch.device, *, timeout: timedelta) -> RankMesh:
        """Make the groups of `mesh` in a process group that is already initialised. Every rank calls it with the same
        mesh, of as many ranks. timeout: of one collective operation."""
        assert dist.get_world_size() == mesh.size
        made: dict[tuple[int, ...], ProcessGroup | None] = {}
        rank, everyone = dist.get_rank(), tuple(range(mesh.size))

        def group(rows: list[list[int]]) -> Group:
            """This rank's group among `rows`. Every rank creates all groups in the same order, as torch requires."""
            for row in map(tuple, rows):
                if row not in made:
                    alone, whole = len(row) == 1, row == everyone
                    made[row] = None if alone else dist.group.WORLD if whole else _new_group(row, timeout)
            mine = next(tuple(row) for row in rows if rank in row)
            return Group(made[mine], mine, mine.index(rank))

        groups = {name: group(rows) for name, rows in mesh.rows().items()}
        control = _new_group(everyone, timeout, "gloo") if mesh.size > 1 else None
        return cls(
            mesh=mesh,
            rank=rank,
            device=device,
            **groups,
            world=group([list(everyone)]),
            host=group(_host_rows(mesh.size, control)),
            control=control,
        )

    def agree(self, value: float, *, largest: bool = True) -> float:
        """The largest (or smallest) value of all ranks, for decisions that must be the same on all."""
        if self.control is None:
            return value
        agreed = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX if largest else dist.ReduceOp.MIN, group=self.control)
        return float(agreed)


def _new_group(ranks: tuple[int, ...], timeout: timedelta, backend: str | None = None) -> ProcessGroup:
    group: Any = dist.new_group(list(ranks), timeout=timeout, backend=backend)
    return group


def _host_rows(size: int, control: ProcessGroup | None) -> list[list[int]]:
    """The ranks of each host. The launcher numbers its agents, one for each host, in GROUP_RANK."""
    if control is None:
        return [[0]]
    mine = torch.tensor([int(os.environ.get("GROUP_RANK", "0"))])
    agents = [torch.zeros_like(mine) for _ in range(size)]
    dist.all_gather(agents, mine, group=control)
    rows: dict[int, list[int]] = {}
    for rank, agent in enumerate(agents):
        rows.setdefault(int(agent), []).append(rank)
    return list(rows.values())


# ------------------------------------------------------------------------------------------ collective operations


def gather_parts(part: Tensor, lengths: list[int], group: Group, dim: int) -> Tensor:
    """The parts of all ranks of `group`, concatenated along `dim`, on every rank. lengths: of each rank's part."""
    if group.size == 1:
        return part
    longest = max(lengths)
    moved = part.movedim(dim, 0)  # [n, ...]
    if moved.shape[0] == longest:
        padded = moved.contiguous()
    else:
        padded = moved.new_empty(longest, *moved.shape[1:])
        padded[: moved.shape[0]] = moved
    joined = padded.new_empty(group.size * longest, *moved.shape[1:])
    all_gather(as_bytes(joined), as_bytes(padded), group)
    if len(set(lengths)) > 1:
        pieces = joined.split(longest)
        joined = torch.cat([piece[:length] for piece, length in zip(pieces, lengths, strict=True)])
    return joined.movedim(0, dim)


def all_gather(into: Tensor, part: Tensor, group: Group) -> None:
    """Gather `part` of every rank of `group` into `into`, in the order of the ranks."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the latter up to torch 2.12
    gather(into, part, group=group.process)


def as_words(x: Tensor) -> Tensor:
    """x [..., D] viewed as 8-byte integers [..., D * itemsize / 8], which kernels copy several times as fast as bytes.

    Copies x if its strides do not allow a view. If D has no whole number of 8-byte integers, returns `as_bytes(x)`;
    this depends on D alone, so that all ranks do the same."""
    count = 8 // x.element_size()
    if x.shape[-1] % count:
        return as_bytes(x)
    fits = x.stride(-1) == 1 and not any(number % count for number in (x.storage_offset(), *x.stride()[:-1]))
    return (x if fits else x.clone(memory_format=torch.contiguous_format)).view(torch.int64)


def as_bytes(x: Tensor) -> Tensor:
    """FP8 viewed as bytes, because not every library can send FP8; other dtypes unchanged."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def all_to_all(into: Tensor, out: Tensor, arriving: list[int], leaving: list[int], group: Group) -> None:
    """Numbers of `out` to all ranks, and theirs into `into`. Both flat; counts of numbers by rank."""
    dist.all_to_all_single(into, out, arriving, leaving, group=group.process)

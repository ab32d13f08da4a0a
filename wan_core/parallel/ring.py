"""Ring attention: keys and values go around while every rank attends with its own queries to those it has.

A rank sends what it holds to its neighbour before it attends to it, so that the next arrive meanwhile. The outputs of
the parts are merged by their log-sum-exps in float32, and divided once. One way, everything moves to the next rank and
wraps around: R - 1 hops, each of one part. Both ways, one stream goes to the next rank and one to the previous, neither
wraps: also R - 1 hops, no more bytes, over both directions of a link (docs/parallel.md says where that pays).

Legend: B batch, N tokens of this rank, h heads of this rank, D head dim, R ranks of the ring.
Source: Ring Attention, arXiv 2310.01889.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.ops.attention.parts import merge
from wan_core.parallel.mesh import Group, as_words, gather_parts

Partial = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""q [B, N, h, D] and some k, v [B, S, h, D] -> output [B, N, h, D] and log-sum-exp float32 [B, h, N]."""


@dataclass(frozen=True)
class Ring:
    """Ranks among which keys and values go around. lengths: tokens of each of them; partial: attention to a part."""

    group: Group
    lengths: list[int]
    partial: Partial
    both_ways: bool = False

    @property
    def index(self) -> int:
        return self.group.index

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of q [B, N, h, D] to all ranks' keys and values: [B, N, h, D] in the partial outputs' dtype."""
        return merge([self.partial(q, keys, values) for _, keys, values in self.around(k, v)])

    def around(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The index of every rank, and its k and v [B, S, h, D]. The next are on their way while one is used."""
        hops = _both_ways if self.both_ways else _one_way
        for rank, packed in hops(torch.stack([as_words(k), as_words(v)]), self.lengths, self.group):
            keys, values = packed.view(k.dtype).unbind()
            yield rank, keys, values

    def gather(self, x: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
        """x of all ranks joined along `dim`, along which each has its length."""
        return gather_parts(x, list(lengths), self.group, dim)


def _one_way(packed: Tensor, lengths: list[int], group: Group) -> Iterator[tuple[int, Tensor]]:
    """This rank's index and keys and values [2, B, N, h, D], then those of the rank before, and so on around."""
    R, me = group.size, group.index
    for hop in range(R):
        arriving, works = None, []
        if hop < R - 1:
            arriving = _room(packed, lengths[(me - hop - 1) % R])
            works = pass_on([(packed, group.ranks[(me + 1) % R])], [(arriving, group.ranks[(me - 1) % R])], group)
        yield (me - hop) % R, packed
        _wait(works)
        if arriving is not None:
            packed = arriving


def _both_ways(packed: Tensor, lengths: list[int], group: Group) -> Iterator[tuple[int, Tensor]]:
    """The same parts, the nearest on both sides first."""
    R, me = group.size, group.index
    upward: Tensor | None = packed  # on its way to higher ranks
    downward: Tensor | None = packed
    here = [(me, packed)]
    for hop in range(1, R + 1):
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        from_below = from_above = None
        if upward is not None and me + 1 < R:
            sends.append((upward, group.ranks[me + 1]))
        if downward is not None and me > 0:
            sends.append((downward, group.ranks[me - 1]))
        if me - hop >= 0:
            from_below = _room(packed, lengths[me - hop])
            receives.append((from_below, group.ranks[me - 1]))
        if me + hop < R:
            from_above = _room(packed, lengths[me + hop])
            receives.append((from_above, group.ranks[me + 1]))
        works = pass_on(sends, receives, group)
        yield from here
        _wait(works)
        upward, downward = from_below, from_above
        here = [(rank, part) for rank, part in ((me - hop, from_below), (me + hop, from_above)) if part is not None]


def _room(like: Tensor, tokens: int) -> Tensor:
    return like.new_empty(*like.shape[:2], tokens, *like.shape[3:])


def pass_on(sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]], group: Group) -> list[Any]:
    """Start sending and receiving, each tensor with the rank at its other end."""
    operations = [dist.P2POp(dist.isend, tensor, peer, group.process) for tensor, peer in sends]
    operations += [dist.P2POp(dist.irecv, tensor, peer, group.process) for tensor, peer in receives]
    return dist.batch_isend_irecv(operations) if operations else []


def _wait(works: list[Any]) -> None:
    """On a GPU this holds the stream, not the host."""
    for work in works:
        work.wait()

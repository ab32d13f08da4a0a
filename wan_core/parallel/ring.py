"""Ring attention: keys and values go around while every rank attends with its own queries to those it has.

A rank sends what it holds to its neighbour before it attends to it, so that the next arrive meanwhile. The outputs of
the parts are merged by their log-sum-exps in float32, and divided once. Everything moves to the next rank and wraps
around: R - 1 hops, each of one part.

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

    @property
    def index(self) -> int:
        return self.group.index

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of q [B, N, h, D] to all ranks' keys and values: [B, N, h, D] in the partial outputs' dtype."""
        return merge([self.partial(q, keys, values) for _, keys, values in self.around(k, v)])

    def around(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The index of every rank, and its k and v [B, S, h, D]. The next are on their way while one is used."""
        for rank, packed in _hops(torch.stack([as_words(k), as_words(v)]), self.lengths, self.group):
            keys, values = packed.view(k.dtype).unbind()
            yield rank, keys, values

    def gather(self, x: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
        """x of all ranks joined along `dim`, along which each has its length."""
        return gather_parts(x, list(lengths), self.group, dim)


def _hops(packed: Tensor, lengths: list[int], group: Group) -> Iterator[tuple[int, Tensor]]:
    """This rank's index and keys and values [2, B, N, h, D], then those of the rank before, and so on around."""
    R, me = group.size, group.index
    for hop in range(R):
        arriving, works = packed, list[Any]()
        if hop < R - 1:
            arriving = packed.new_empty(*packed.shape[:2], lengths[(me - hop - 1) % R], *packed.shape[3:])
            works = pass_on(packed, arriving, group)
        yield (me - hop) % R, packed
        for work in works:  # on a GPU this holds the stream, not the host
            work.wait()
        packed = arriving


def pass_on(packed: Tensor, arriving: Tensor, group: Group) -> list[Any]:
    """Start sending to the next rank of the ring, and receiving from the one before."""
    ranks, me = group.ranks, group.index
    send = dist.P2POp(dist.isend, packed, ranks[(me + 1) % len(ranks)], group.process)
    receive = dist.P2POp(dist.irecv, arriving, ranks[me - 1], group.process)
    return dist.batch_isend_irecv([send, receive])

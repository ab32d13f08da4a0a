"""The one protocol of attention: what backends, sparse attention and attention over several ranks declare and do.

A transformer block asks `SelfAttention.attend`, an `Attention`, for nothing that is not declared here. Wrappers
(several ranks, sparse attention) are `Attention`s too.

Legend: B batch, L query tokens, S key tokens, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wan_core.ops.attention.tiles import Tiles
from wan_core.ops.kernels.formats import Quantized
from wan_core.ops.kernels.fused import Agree

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [B, L, H, D], k and v [B, S, H, D] -> [B, L, H, D]; any strides with D contiguous."""

AttendLse = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""The same with the log-sum-exp: float32 [B, H, L], natural logarithm of the sum of exponentials of scaled scores."""


class SparseState:
    """What sparse attention reads in one forward: `sparse.forward.SparseForward`, of which models see the tiles."""

    tiles: Tiles

    @property
    def block(self) -> int:
        return self.tiles.block


@dataclass(frozen=True)
class AttentionCall:
    """Which call of attention this is. The loop over the blocks makes one for each layer and hands it down.

    layer: index of the block. sparse: what this forward reads, None where every layer reads all keys. lengths: tokens
    of every shard, empty where one device has all tokens. own: what the attention of a family reads besides
    (`WanModel.own_attention`).
    """

    layer: int = 0
    sparse: SparseState | None = None
    lengths: Sequence[int] = ()
    own: object | None = None


SINGLE = AttentionCall()


class Ring(Protocol):
    """The ranks of a ring: see `wan_core.parallel.ring.Ring`."""

    @property
    def index(self) -> int: ...
    @property
    def lengths(self) -> Sequence[int]: ...
    @property
    def partial(self) -> AttendLse: ...
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...
    def around(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]: ...
    def gather(self, x: Tensor, lengths: Sequence[int], dim: int) -> Tensor: ...


class Attention:
    """Attention of queries to keys. Subclasses implement `__call__`, and what their declarations promise.

    takes_fp8: a block hands over q, k and v as `Quantized`, with one scale each and K's mean removed, to `quantized`.
    block: the length of the blocks that q, k and v are laid out in (`wan_core.ops.kernels.blocked`); 0: any layout.
    gives_lse: `with_lse` (and `quantized_lse`, with `takes_fp8`) is implemented.
    agree: makes scales and means equal on all ranks that share the tokens; None where one device has all tokens.
    """

    takes_fp8: bool = False
    block: int = 0
    gives_lse: bool = False
    agree: Agree | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> Tensor:
        """q [B, L, H, D], k and v [B, S, H, D] -> [B, L, H, D] in q's dtype."""
        raise NotImplementedError

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> tuple[Tensor, Tensor]:
        """Also the log-sum-exp of the scaled scores, float32 [B, H, L]."""
        raise NotImplementedError(f"{type(self).__name__} does not return the log-sum-exp")

    def quantized(self, q: Quantized, k: Quantized, v: Quantized, call: AttentionCall = SINGLE) -> Quantized:
        """FP8 q, k, v with scales [1] -> FP8 [B, L, H, D] under one scale."""
        raise NotImplementedError(f"{type(self).__name__} takes no FP8")

    def quantized_lse(self, q: Quantized, k: Quantized, v: Quantized) -> tuple[Quantized, Tensor]:
        """Also the log-sum-exp of the scaled scores, float32 [B, H, L]."""
        raise NotImplementedError(f"{type(self).__name__} returns no log-sum-exp of FP8")

    def over_ring(self, q: Tensor, k: Tensor, v: Tensor, ring: Ring, call: AttentionCall) -> Tensor:
        """[B, N, H, D] of this rank's tokens, keys and values of the others passed around -> the same."""
        return ring.attend(q, k, v)

    @property
    def local(self) -> Attention:
        """What attends on this device: itself, or what is inside a wrapper that exchanges tokens between ranks."""
        return self

    def around(self, local: Attention) -> Attention:
        """The same wrapper around another `local`; itself is no wrapper."""
        return local


class Dense(Attention):
    """A kernel that reads all keys, as one or two plain functions."""

    def __init__(self, attend: Attend | None, attend_lse: AttendLse | None = None) -> None:
        self.attend, self.attend_lse = attend, attend_lse
        self.gives_lse = attend_lse is not None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> Tensor:
        return self.with_lse(q, k, v)[0] if self.attend is None else self.attend(q, k, v)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> tuple[Tensor, Tensor]:
        if self.attend_lse is None:
            return super().with_lse(q, k, v)
        return self.attend_lse(q, k, v)


def empty_like_heads(q: Tensor) -> Tensor:
    """The contiguous result where a rank has no heads."""
    return torch.empty_like(q, memory_format=torch.contiguous_format)

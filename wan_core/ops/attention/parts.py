"""Attention of parts: of the queries, one after the other, and of parts of the keys, merged.

`InPieces` makes a call between the parts of the queries: on a CPU, one call of a large video takes minutes, and a user
who interrupts waits for its end. `merge` joins attention to parts of the keys by the log-sum-exp: the result is that
of one softmax over all of them.

Legend: B batch, L query tokens (N of a rank), S key tokens, H heads (h of a rank), D head dim, R parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from wan_core.ops.attention.protocol import SINGLE, Attend, Attention, AttentionCall

MOST = 2**33  # multiplications of one piece: about a second of one core


class InPieces(Attention):
    """The attention `inner`, with `between` called before each piece. It may raise. Equal but for rounding."""

    def __init__(self, inner: Attention, between: Callable[[], None]) -> None:
        self.inner, self.between = inner, between
        self.gives_lse = inner.gives_lse

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> Tensor:
        parts = [self.inner(part, k, v, call) for part in self._pieces(q, k)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall = SINGLE) -> tuple[Tensor, Tensor]:
        outs, lses = zip(*(self.inner.with_lse(part, k, v, call) for part in self._pieces(q, k)), strict=True)
        return torch.cat(outs, 1), torch.cat(lses, 2)

    def _pieces(self, q: Tensor, k: Tensor) -> Iterator[Tensor]:
        """Parts of the queries [B, L, H, D]."""
        for part in q.split(piece_length(q.shape[0] * q.shape[2] * q.shape[3], k.shape[1]), 1):
            self.between()
            yield part


def heads_in_pieces(attend: Attend, between: Callable[[], None]) -> Attend:
    """Split the queries like `InPieces`, for a function of q [B, H, L, D], k and v [B, H, S, D] -> [B, H, L, D]."""

    def attend_pieces(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for part in q.split(piece_length(q.shape[0] * q.shape[1] * q.shape[3], k.shape[2]), 2):
            between()
            outs.append(attend(part, k, v))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    return attend_pieces


def piece_length(width: int, keys: int) -> int:
    """How many queries of `width` numbers each a piece has."""
    return max(1, MOST // (2 * width * keys))


def merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Partial outputs [B, N, h, D] with log-sum-exps float32 [B, h, N] -> the output, in their dtype. Where a part's
    is -inf the part has no weight."""
    if len(parts) == 1:
        return parts[0][0]
    # softmax over the parts: exp(lse - largest) / sum, which is numerators over one maximum, divided once
    weights = torch.stack([lse for _, lse in parts]).softmax(0).transpose(2, 3)[..., None]  # [R, B, N, h, 1]
    dtype = parts[0][0].dtype
    outs = [out.to(torch.bfloat16) if dtype.itemsize == 1 else out for out, _ in parts]  # E4M3 is exact in bf16
    total = outs[0] * weights[0]  # float32, as the weights are
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        total.addcmul_(out, weight)
    return total.to(dtype)


def merge_lse(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The result of `merge`, and the log-sum-exp of all parts together, float32 [B, h, N]."""
    if len(parts) == 1:
        return parts[0]
    return merge(parts), torch.stack([lse for _, lse in parts]).logsumexp(0)

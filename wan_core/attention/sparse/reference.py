"""Block-sparse attention in plain torch, for blocks of any length: what kernels are tested against, and what runs where
none does (a CPU, the embedded model). It holds the whole matrix of scores of one head at a time.

Legend: B batch, L tokens, H heads, D head dim, n blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan_core.attention.sparse.routing import Route


def sparse_reference(q: Tensor, k: Tensor, v: Tensor, route: Route, block: int) -> tuple[Tensor, Tensor]:
    """q, k, v [B, L, H, D] -> attention over the blocks of keys that `route` names, [B, L, H, D] in q's dtype, and its
    log-sum-exp, float32 [B, H, L]."""
    kept = route.kept(-(-k.shape[1] // block))
    out, lse = torch.empty_like(q, memory_format=torch.contiguous_format), []
    for head in range(q.shape[2]):
        scores = (q[:, :, head].float() @ k[:, :, head].float().mT) * q.shape[-1] ** -0.5  # [B, L, S]
        scores = scores.masked_fill_(~spread(kept[:, head], block, q.shape[1], k.shape[1]), float("-inf"))
        lse.append(scores.logsumexp(-1))
        out[:, :, head] = (scores.softmax(-1) @ v[:, :, head].float()).type_as(q)
    return out, torch.stack(lse, 1)


def spread(kept: Tensor, block: int, queries: int, keys: int) -> Tensor:
    """bool [..., n, n] of blocks -> [..., queries, keys] of tokens."""
    return kept.repeat_interleave(block, -2)[..., :queries, :].repeat_interleave(block, -1)[..., :keys]

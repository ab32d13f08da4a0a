"""Block-sparse attention in plain torch, for blocks of any length: what kernels are tested against, and what runs where
none does (a CPU, the embedded model). It holds the scores of one head at a time, of `SCORES` at most.

Legend: B batch, L tokens, H heads, D head dim, n blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wan_core.ops.attention.sparse.routing import Route

SCORES = 1 << 26  # of queries and keys that are held at once, 256 MiB, in whole blocks of queries


def sparse_reference(q: Tensor, k: Tensor, v: Tensor, route: Route, block: int) -> tuple[Tensor, Tensor]:
    """q, k, v [B, L, H, D] -> attention over the blocks of keys that `route` names, [B, L, H, D] in q's dtype, and its
    log-sum-exp, float32 [B, H, L]."""
    B, L, H, D = q.shape
    kept = route.kept(-(-k.shape[1] // block))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(B, H, L, device=q.device)
    rows = max(1, SCORES // (B * k.shape[1] * block)) * block
    for head in range(H):
        keys, values = k[:, :, head].float(), v[:, :, head].float()
        for start in range(0, L, rows):
            some = slice(start, start + rows)
            mask = kept[:, head, start // block : (start + rows) // block]
            scores = (q[:, some, head].float() @ keys.mT) * D**-0.5  # [B, rows, S]
            scores.masked_fill_(~spread(mask, block, scores.shape[1], k.shape[1]), float("-inf"))
            lse[:, head, some] = scores.logsumexp(-1)
            out[:, some, head] = (scores.softmax(-1) @ values).type_as(q)
    return out, lse


def spread(kept: Tensor, block: int, queries: int, keys: int) -> Tensor:
    """bool [..., n, n] of blocks -> [..., queries, keys] of tokens."""
    return kept.repeat_interleave(block, -2)[..., :queries, :].repeat_interleave(block, -1)[..., :keys]

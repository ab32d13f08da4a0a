"""Block-sparse attention in plain torch: random routes, what kernels promise, and ranks of a ring in one process.

Legend: B batch, L tokens, H heads, D head dim, n blocks.
"""

from __future__ import annotations

import torch

from wan_core.ops.attention.sparse.kernels import sparse_reference
from wan_core.ops.attention.sparse.routing import KeyMeans, Route, Rule, choose, expected_error
from wan_core.ops.kernels.block_layout import Blocked, block_sizes
from wan_core.ops.kernels.blocked import pool


def route(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: int, rule: Rule, forced: torch.Tensor) -> Route:
    """The choice of blocks for q, k, v [B, L, H, D]."""
    means = known_of(k, v, block)
    return choose(expected_error(pool(q, block)[0], means), rule, forced, means.sizes)


def drawn(tokens: int, seed: int, batch: int = 2, heads: int = 3, dim: int = 16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, tokens, heads, dim, generator=generator) for _ in range(3))


def random_route(tokens: int, block: int, seed: int, batch: int = 2, heads: int = 3) -> Route:
    """Any blocks, as many in every row, none twice."""
    generator = torch.Generator().manual_seed(seed)
    n = -(-tokens // block)
    order = torch.rand(batch, heads, n, n, generator=generator).argsort(-1).int()
    return Route(order[..., : int(torch.randint(1, n + 1, (), generator=generator))].contiguous())


def whole_block_kernel(
    q: Blocked, k: Blocked, v: Blocked, route: Route, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the FP8 kernel promises, in torch: whole blocks, the keys of zeros at their end among them."""
    wide = [x.memory.float() * x.scale for x in (q, k, v)]
    heads = wide[0].transpose(1, 2), wide[1].transpose(1, 2), wide[2].permute(0, 3, 1, 2)
    out, lse = sparse_reference(*heads, route, block)
    return out[:, : q.tokens], lse


def known_of(k: torch.Tensor, v: torch.Tensor, block: int) -> KeyMeans:
    return KeyMeans(*pool(k, block), *pool(v, block), block_sizes(k.shape[1], block, k.device))

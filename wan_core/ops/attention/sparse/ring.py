"""Block-sparse attention where keys and values go around a ring of ranks.

Every rank has some of the tokens, in the order of the tiles, cut at whole blocks. Its rows choose among the blocks of
all ranks, by means that the ranks exchanged (`SparseForward.over_ring`). Here each row reads its chosen blocks as the
keys and values of their rank arrive. The partial outputs are merged by their log-sum-exps.

Legend: B batch, N tokens of a rank, h heads, D head dim, r blocks of a rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wan_core.ops.attention.protocol import Ring
from wan_core.ops.attention.sparse.kernels import Run
from wan_core.ops.attention.sparse.routing import Route
from wan_core.ops.kernels.block_layout import Blocked
from wan_core.ops.kernels.blocked import pool
from wan_core.ops.kernels.formats import Quantized

Numbers = Tensor | Quantized
Part = tuple[Tensor, Tensor]
"""Output [B, N, h, D] and log-sum-exp float32 [B, h, N]."""


def ring_blocks(ring: Ring, block: int) -> list[int]:
    """How many blocks each rank has."""
    assert all(length % block == 0 for length in ring.lengths[:-1]), f"{ring.lengths} tokens in blocks of {block}"
    return [-(-length // block) for length in ring.lengths]


def read_around(
    run: Run,
    q: Tensor,
    k: Numbers,
    v: Numbers,
    route: Route,
    block: int,
    ring: Ring,
    see: Callable[[int, Tensor, Tensor], None] | None = None,
) -> Part:
    """Attention of this rank's q [B, N, h, D] to the blocks of all ranks' keys that `route` names.

    k, v: this rank's, which go around as they come, in FP8 at half the size, and are widened where they arrive.
    see: is given the first block, the keys and the values of each rank.
    """
    blocks, parts = ring_blocks(ring, block), []
    for rank, keys, values in ring.around(data(k), data(v)):
        first, keys, values = sum(blocks[:rank]), widened(keys, k), widened(values, v)
        some, none = route.part(first, blocks[rank])
        out, lse = run(q, keys, values, some, block)
        none = none.repeat_interleave(block, -1)[..., : q.shape[1]]
        parts.append((out, lse.masked_fill(none, float("-inf"))))
        if see is not None:
            see(first, keys, values)
    return ring.merge(parts)


def data(x: Numbers) -> Tensor:
    """What goes around."""
    return x if isinstance(x, Tensor) else x.data


def widened(arrived: Tensor, like: Numbers) -> Tensor:
    """What came around, as kernels read it; `like`: this rank's own, of the same scale as that of all ranks."""
    if isinstance(like, Tensor):
        return arrived
    return Quantized(arrived, like.scale).dequantize(torch.bfloat16 if arrived.is_cuda else torch.float32)


def block_means(x: Numbers | Blocked, block: int) -> tuple[Tensor, Tensor]:
    """Means and variances of blocks, float32 [B, h, r, D], by `pool`."""
    return pool(x, block) if isinstance(x, Tensor) else pool(x.data, block, x.scale)

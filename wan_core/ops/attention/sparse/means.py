"""What is known of keys and values that are not read: their means and variances, by parts of blocks.

A block may be one part or several (`Tiles.parts`). Finer parts replace an unselected block more closely, and tell more
about the error that this replacement makes. With p parts for each of n blocks, a row of queries costs as much as
reading p keys.

Legend: B batch, L tokens, H heads, D head dim, n blocks, p parts of all blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from wan_core.ops.kernels.block_layout import Pooled


class KeyMeans(NamedTuple):
    """keys, variance: of the keys of each part, float32 [B, H, p, D]. values, scatter: means and variances of its
    values, the same; None where neither the choice nor the replacement needs them. sizes: int32 [p], tokens of each
    part. parts: of a block; the last block may have fewer."""

    keys: Tensor
    variance: Tensor
    sizes: Tensor
    values: Tensor | None = None
    scatter: Tensor | None = None
    parts: int = 1

    def blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Means and variances of the keys of whole blocks, float32 [B, H, n, D], and the tokens of each, int32 [n]."""
        if self.parts == 1:
            return self.keys, self.variance, self.sizes
        weight = self.sizes.float()[:, None]
        sizes = block_sums(self.sizes, self.parts)
        total = sizes.float()[:, None]
        mean = block_sums((self.keys * weight).mT, self.parts).mT / total
        square = block_sums(((self.variance + self.keys.square()) * weight).mT, self.parts).mT / total
        return mean, (square - mean.square()).clamp_(min=0), sizes

    def pooled(self, kept: Tensor) -> Pooled:
        """What replaces the blocks that are not `kept`, bool [B, H, r, n]."""
        assert self.values is not None, "the means of the values are needed"
        return Pooled(self.keys, self.values, kept, self.sizes, self.parts)


def block_sums(x: Tensor, parts: int) -> Tensor:
    """Sums of x [..., p] over the parts of each block: [..., n]."""
    return F.pad(x, (0, -x.shape[-1] % parts)).unflatten(-1, (-1, parts)).sum(-1, dtype=x.dtype)

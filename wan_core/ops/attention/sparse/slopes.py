"""The first-order term of unselected blocks: how their values follow the scores of their keys.

The mean of a block's values is what all its keys give at equal weight. A query q weighs them by exp(q . k), to first
order 1 + q . (k - mean), so the values move by q C, C being the covariance of keys and values (arXiv:2601.02077, which
has one C for all blocks). A product with C for each query and block would cost half of what reading the block does.
Here the queries of a block share one matrix, the mean of C over the blocks that they do not read, weighed by what the
means of queries and keys say: one product per query. Where scores scatter much the linear term overshoots, so a block
counts by 1 / (1 + variance of its scores).

Legend: B batch, L tokens, H heads, D head dim, n blocks, r blocks of queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.ops.attention.sparse.routing import KeyMeans
from wan_core.ops.kernels.block_layout import Blocked
from wan_core.ops.kernels.formats import Quantized

Keys = Tensor | Quantized | Blocked
HEADS = 8  # at a time


def slope_weights(queries: Tensor, known: KeyMeans, kept: Tensor) -> Tensor:
    """float32 [B, H, r, n]: by how much the covariance of each block counts in the slope of a row; 0 for `kept` ones,
    bool [B, H, r, n]. queries: means, float32 [B, H, r, D]."""
    scale = queries.shape[-1] ** -0.5
    mass = scale * (queries @ known.keys.mT) + known.sizes.log()
    share = mass.masked_fill_(kept, float("-inf")).softmax(-1).nan_to_num_()  # a row may read everything
    scatter = scale**2 * (queries.square() @ known.variance.mT)
    return scale * share / ((1 + scatter) * known.sizes)


def slopes(weights: Tensor, means: Tensor, k: Keys, v: Keys, block: int) -> Tensor:
    """The slope of each row, [B, H, r, D, D], bf16 on a GPU and float32 elsewhere: values for each query channel.

    weights: [B, H, r, n] for the blocks of `block` keys of k, v [B, L, H, D], means [B, H, n, D] of the keys. A few
    heads at a time, because the covariances of one at 720p are 19 MB."""
    out = means.new_empty(*weights.shape[:3], means.shape[-1], means.shape[-1], dtype=_wide(means))
    weights = weights * (_scale(k) * _scale(v))
    for sample, heads in _groups(weights):
        covariances = _covariances(means, k, v, block, sample, heads)
        torch.bmm(weights[sample, heads].to(out.dtype), covariances, out=out[sample, heads].flatten(2))
    return out


class Covariances:
    """The covariances of keys and values of each block, for several sets of rows; arguments as for `slopes`."""

    def __init__(self, means: Tensor, k: Tensor, v: Tensor, block: int) -> None:
        B, H, n, D = means.shape
        self.kept = means.new_empty(B, H, n, D * D, dtype=_wide(means))
        for sample, heads in _groups(means):
            self.kept[sample, heads] = _covariances(means, k, v, block, sample, heads)

    def add_to(self, slopes: Tensor, weights: Tensor) -> None:
        """Add the slopes by `weights` of the blocks to those of others."""
        for sample, more in enumerate(weights.to(slopes.dtype)):
            slopes[sample].flatten(2).baddbmm_(more, self.kept[sample])


def _covariances(means: Tensor, k: Keys, v: Keys, block: int, sample: int, heads: slice) -> Tensor:
    """[h, n, D * D], summed over the keys of each block, in units of k and v."""
    keys, values = (_blocks(x, sample, heads, block).to(_wide(means)) for x in (k, v))
    keys = keys - (means[sample, heads] / _scale(k))[:, :, None].to(keys.dtype)
    return (keys.mT @ values).flatten(2)


def _groups(x: Tensor) -> Iterator[tuple[int, slice]]:
    """Samples and a few heads of x [B, H, ...]."""
    return product(range(x.shape[0]), (slice(first, first + HEADS) for first in range(0, x.shape[1], HEADS)))


def _wide(x: Tensor) -> torch.dtype:
    return torch.bfloat16 if x.is_cuda else torch.float32


def _scale(x: Keys) -> Tensor | float:
    return 1.0 if isinstance(x, Tensor) else x.scale


def _blocks(x: Keys, sample: int, heads: slice, block: int) -> Tensor:
    """The numbers of some heads, [h, n, block, D], with zeros after the last token."""
    if isinstance(x, Blocked):
        some = x.memory[sample, heads].mT if x.channels_first else x.memory[sample, heads]
        some = some[:, : -(-x.tokens // block) * block]
    else:
        some = (x if isinstance(x, Tensor) else x.data)[sample, :, heads].transpose(0, 1)
    short = -some.shape[1] % block
    if short:
        some = F.pad(some if some.dtype.itemsize > 1 else some.float(), (0, 0, 0, short))
    return some.unflatten(1, (some.shape[1] // block, block))

"""Which blocks of keys each block of queries reads: from the means of the blocks, without training.

A block is worth the error that its means make in its place (arXiv:2603.08982): the attention that the variance of its
keys adds, times the distance of its values from the output. For keys that scatter normally around their mean the
logarithm of the mean of exp(q . k) is that of the mean, and half the variance of q . k: the sum over channels of q^2
times the variance of the keys, one small product.

Legend: B batch, L tokens, H heads, D head dim, n blocks of keys, r blocks of queries, K blocks kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wan_core.ops.kernels.block_layout import Pooled


class KeyMeans(NamedTuple):
    """keys, variance, values, scatter: means and variances of the keys of each block, and of its values, float32
    [B, H, n, D]. sizes: int32 [n], tokens of each block."""

    keys: Tensor
    variance: Tensor
    values: Tensor
    scatter: Tensor
    sizes: Tensor

    def pooled(self, kept: Tensor, slopes: Tensor | None = None) -> Pooled:
        """What replaces the blocks that are not `kept`, bool [B, H, r, n]. slopes: [B, H, r, D, D]."""
        return Pooled(self.keys, self.values, kept, self.sizes, slopes)


AT_ONCE = 1 << 23  # numbers of queries and parts that are held at once
SINKS = 1  # blocks that most queries of a head look at, kept for all of them


class Route(NamedTuple):
    """What is read: `blocks` int32 [B, H, r, K]. The order of a row means nothing, and no block is in a row twice."""

    blocks: Tensor

    def kept(self, count: int) -> Tensor:
        """bool [B, H, r, count]: which of `count` blocks of keys are read."""
        selected = torch.zeros(*self.blocks.shape[:-1], count, dtype=torch.bool, device=self.blocks.device)
        return selected.scatter_(-1, self.blocks.long(), True)


@dataclass(frozen=True)
class Rule:
    """How many blocks a row keeps: a share of them."""

    keep: float

    def most(self, blocks: int) -> int:
        return min(blocks, max(1, round(self.keep * blocks)))


def expected_error(queries: Tensor, known: KeyMeans) -> Tensor:
    """float32 [B, H, r, n]: how much it is worth to read each block, for one of its keys, as a logarithm: by how much
    the output changes when the block's means replace it. queries: means, float32 [B, H, r, D].

    The block's mass with the variance of its keys, less that of their mean, moves the output by that times the distance
    of the values: of their mean from the output, and of each from their mean. Some heads at a time."""
    scale, counts, errors = queries.shape[-1] ** -0.5, known.sizes.log(), []
    for start in range(0, queries.shape[1], heads := max(1, AT_ONCE // (queries.shape[2] * len(known.sizes)))):
        some = slice(start, start + heads)
        rows, values = queries[:, some], known.values[:, some]
        plain = scale * (rows @ known.keys[:, some].mT)
        raised = plain + gain(scale**2 * (rows.square() @ known.variance[:, some].mT), known.sizes)
        plain, raised = plain + counts, raised + counts
        total = raised.logsumexp(-1, keepdim=True)
        mass = (raised - total).exp()
        out = mass @ values
        away = values.square().sum(-1)[..., None, :] - 2 * (out @ values.mT) + out.square().sum(-1, keepdim=True)
        away = away.clamp_(min=0) + known.scatter[:, some].sum(-1)[..., None, :]
        errors.append((mass - (plain - total).exp()).square() * away)
    tiny = torch.finfo(torch.float32).tiny
    return 0.5 * torch.cat(errors, 1).clamp_(min=tiny).log() - counts


def gain(variance: Tensor, sizes: Tensor) -> Tensor:
    """By how much the logarithm of the mean of exp(s) is above the mean of s, for sizes [n] scores s that scatter
    normally with `variance` [..., n]: half of it, as long as that many draws reach where the exponential has its
    weight; beyond, the largest draw alone counts (the random energy model)."""
    reach = 2 * sizes.float().log()
    return torch.where(variance <= reach, 0.5 * variance, (variance * reach).sqrt() - 0.5 * reach)


def choose(scores: Tensor, rule: Rule, forced: Tensor, sizes: Tensor) -> Route:
    """The blocks that `rule` keeps by `scores` [B, H, r, n], those that are `forced` [r, n] first of all, then the
    heads' sinks; sizes [n] of the blocks. Where there are more forced ones than the rule keeps, the best of them."""
    count = scores.shape[-1]
    weight = scores + sizes.log()  # of the whole block
    share = weight.softmax(-1)
    # A share is at most 1, so that of a sink with its bonus at most 2: less than any forced block has.
    sinks = share.mean(2, keepdim=True).topk(min(SINKS, count), dim=-1).indices
    bonus = (3 * forced.to(share.dtype)).expand(share.shape[0], share.shape[1], -1, -1)
    ranked = (share + bonus).scatter_add(
        -1, sinks.expand(-1, -1, share.shape[2], -1), torch.ones_like(share[..., :SINKS])
    )
    return Route(ranked.topk(rule.most(count), dim=-1, sorted=False).indices.int())

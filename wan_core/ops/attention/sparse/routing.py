"""Which blocks of keys each block of queries reads: from the means of the blocks, without training.

A block of keys is worth the attention it would get: the sum over its keys of exp(q . k). The mean of the queries and
the mean of the keys estimate that, and miss a block with a few keys that stand out. For keys that scatter normally
around their mean the logarithm of the mean of the exponentials is mean + variance / 2, where the variance of q . k is
the sum over channels of q^2 times the variance of the keys: one more small product. `score="spread"` adds it,
`score="mean"` does not. `score="error"` ranks by the error that a block's means make in its place
(arXiv:2603.08982): the mass that the variance adds, times the distance of its values from the output.

Legend: B batch, L tokens, H heads, D head dim, n blocks (of queries and of keys), p parts of all blocks, K
blocks kept, r blocks of queries: n, or those of one rank where others have the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
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


Score = Literal["mean", "spread", "error"]
AT_ONCE = 1 << 23  # numbers of queries and parts that are held at once
SINKS = 1  # blocks that most queries of a head look at, kept for all of them


class Route(NamedTuple):
    """What is read: `blocks` int32 [B, H, r, K], of which the first `counts` int32 [B, H, r] hold; None: all of them.

    The order of a row means nothing. No block is in a row twice, and a row is never empty.
    """

    blocks: Tensor
    counts: Tensor | None = None

    def valid(self) -> Tensor:
        """bool [B, H, r, K]: which of `blocks` hold."""
        if self.counts is None:
            return torch.ones_like(self.blocks, dtype=torch.bool)
        return torch.arange(self.blocks.shape[-1], device=self.blocks.device) < self.counts[..., None]

    def part(self, first: int, count: int) -> tuple[Route, Tensor]:
        """What is read of `count` blocks from `first` on, numbered from 0, rising; and bool [B, H, r], the rows
        that read none of them. Those are given block 0, because kernels need a block for every row; their
        result has no weight."""
        there = self.valid() & (self.blocks >= first) & (self.blocks < first + count)
        blocks = (
            torch.where(there, self.blocks - first, count).sort(-1).values[..., : min(self.blocks.shape[-1], count)]
        )
        number = there.sum(-1)
        return Route(torch.where(blocks < count, blocks, 0), number.clamp(min=1).int()), number == 0

    def kept(self, count: int) -> Tensor:
        """bool [B, H, r, count]: which of `count` blocks of keys are read."""
        valid = self.valid()
        selected = torch.zeros(*self.blocks.shape[:-1], count + 1, dtype=torch.bool, device=valid.device)
        where = torch.where(valid, self.blocks.long(), count)
        return selected.scatter_(-1, where, True)[..., :count]


@dataclass(frozen=True)
class Rule:
    """How many blocks a row keeps: `keep` of them, or those that hold `mass` of the attention as estimated, at least
    `floor` and at most `keep` (all shares of the blocks)."""

    keep: float
    mass: float | None = None
    floor: float = 0.0
    score: Score = "spread"

    def most(self, blocks: int) -> int:
        return min(blocks, max(1, round(self.keep * blocks)))


def scores(queries: Tensor, known: KeyMeans, score: Score) -> Tensor:
    """float32 [B, H, r, n]: how much each block is worth to read, for one of its keys, as a logarithm. queries: means,
    float32 [B, H, r, D]."""
    return expected_error(queries, known) if score == "error" else estimate(queries, *known.blocks(), score)


def expected_error(queries: Tensor, known: KeyMeans) -> Tensor:
    """Scores like `scores`: how much the output changes for each key of a block when the means of its parts replace the
    block.

    The part's mass with the variance of its keys, less that of their mean, moves the output by that times the distance
    of the values: of their mean from the output, and of each from their mean. Some heads at a time."""
    assert known.values is not None and known.scatter is not None, "the error needs the values"
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
        errors.append(block_sums((mass - (plain - total).exp()).square() * away, known.parts))
    tiny = torch.finfo(torch.float32).tiny
    return 0.5 * torch.cat(errors, 1).clamp_(min=tiny).log() - block_sums(known.sizes, known.parts).log()


def estimate(queries: Tensor, keys: Tensor, variance: Tensor, sizes: Tensor, score: Score) -> Tensor:
    """float32 [B, H, r, n]: the logarithm of the mean over a block's keys of exp(q . k / sqrt D), roughly. Means of
    queries, float32 [B, H, r, D], and of keys and the keys' variances, [B, H, n, D]; sizes [n]."""
    scale = queries.shape[-1] ** -0.5
    estimates = scale * (queries @ keys.mT)
    if score == "spread":
        estimates = estimates + gain(scale**2 * (queries.square() @ variance.mT), sizes)
    return estimates


def gain(variance: Tensor, sizes: Tensor) -> Tensor:
    """By how much the logarithm of the mean of exp(s) is above the mean of s, for sizes [n] scores s that scatter
    normally with `variance` [..., n]: half of it, as long as that many draws reach where the exponential has its
    weight; beyond, the largest draw alone counts (the random energy model)."""
    reach = 2 * sizes.float().log()
    return torch.where(variance <= reach, 0.5 * variance, (variance * reach).sqrt() - 0.5 * reach)


def over_rows(share: Tensor) -> Tensor:
    """The mean of [B, H, r, n] over rows: [B, H, 1, n]."""
    return share.mean(2, keepdim=True)


def choose(
    scores: Tensor, rule: Rule, forced: Tensor, sizes: Tensor, average: Callable[[Tensor], Tensor] = over_rows
) -> Route:
    """The blocks that `rule` keeps by `scores` [B, H, r, n], those that are `forced` [r, n] first of all, then the
    heads' sinks; sizes [n] of the blocks. Where there are more forced ones than the rule keeps, the best of them.
    average: as `over_rows`, of all rows where these are some of them."""
    count = scores.shape[-1]
    weight = scores + sizes.log()  # of the whole block
    share = weight.softmax(-1)
    sinks = average(share).topk(min(SINKS, count), dim=-1).indices
    bonus = (2 * forced.to(share.dtype)).expand(share.shape[0], share.shape[1], -1, -1)
    ranked = (share + bonus).scatter_add(
        -1, sinks.expand(-1, -1, share.shape[2], -1), torch.ones_like(share[..., :SINKS])
    )
    best = ranked.topk(rule.most(count), dim=-1, sorted=rule.mass is not None)
    if rule.mass is None:
        return Route(best.indices.int())
    covered = share.gather(-1, best.indices).cumsum(-1)
    enough = (covered < rule.mass).sum(-1) + 1
    floor = max(1, round(rule.floor * count))
    must = (best.values >= 1).sum(-1)  # forced ones and sinks
    counts = torch.maximum(enough, must.clamp(min=floor)).clamp(max=best.indices.shape[-1])
    return Route(best.indices.int(), counts.int())

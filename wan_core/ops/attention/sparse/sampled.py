"""The error of sparse attention in the steps that compute it: a few rows of queries attend to all keys as well.

The rows are stratified over the order of the tiles, and others in each step. Their error stands for that of all rows:
128 of 75,600 cost 0.17 % of what dense attention does.

Legend: B batch, L tokens, s sampled rows, H heads, D head dim, n blocks of keys, r blocks of queries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wan_core.ops.kernels.block_layout import Pooled
from wan_core.ops.kernels.blocked import without_pads

ROWS = 128
GOLDEN = (5**0.5 - 1) / 2  # multiples of it spread evenly: a stratum's rows do not repeat from step to step
SEED = 20261124
HEADS = 4  # at a time, whose slopes are gathered


class Rows(NamedTuple):
    """Rows to compare, rising. here: the same, int64 [s] on the device."""

    host: Sequence[int]
    here: Tensor


@dataclass(frozen=True)
class Samples:
    """rows: (layer, tokens, device) -> which rows to compare, as `sample_rows`. note: is given the layer, the forward
    (`SparseForward.branches`) and the sums of squares [2, h] of the heads that are here."""

    rows: Callable[[int, int, torch.device], Rows]
    note: Callable[[int, Hashable, Tensor], None]


def sample_rows(layer: int, step: int, tokens: int, device: torch.device) -> Rows:
    """One row of each of min(128, tokens) equal parts, drawn by layer and step."""
    count = min(ROWS, tokens)
    shift = (_jitter(layer)[:count] + step * GOLDEN) % 1
    rows = ((torch.arange(count) + shift) * tokens / count).long().clamp_(max=tokens - 1)
    cuda = device.type == "cuda"
    return Rows(rows.tolist(), rows.pin_memory().to(device, non_blocking=True) if cuda else rows.to(device))


def taken(x: Tensor, rows: Tensor) -> Tensor:
    """x[:, rows]; FP8 as bytes, because not every torch indexes it."""
    return x[:, rows] if x.dtype.itemsize > 1 else x.view(torch.uint8)[:, rows].view(x.dtype)


@functools.lru_cache(maxsize=256)
def _jitter(layer: int) -> Tensor:
    return torch.rand(ROWS, generator=torch.Generator().manual_seed(SEED + layer), dtype=torch.float64)


def squares(sparse: Tensor, exact: Tensor, rounding: Tensor | float = 0.0) -> Tensor:
    """float32 [2, H]: sums over [B, s, H, D] of the squared difference and of the squared exact output. rounding:
    expected square of what rounding changed of `exact`, which is no error of `sparse`."""
    exact = exact.float()
    off = (sparse.float() - exact).square_() - rounding
    return torch.stack([off.sum((0, 1, 3)), exact.square().sum((0, 1, 3))])


def rounding_of(x: Tensor) -> Tensor:
    """The expected square of the rounding of numbers that are in E4M3, three bits of mantissa: a twelfth of the squared
    distance of two numbers, and less at powers of two, below which they are half as far apart."""
    mantissa, exponent = torch.frexp(x.float())
    apart = torch.ldexp(torch.ones_like(mantissa), exponent - 4)
    return torch.where(mantissa == 0, 0.0, apart.square_() / torch.where(mantissa.abs() == 0.5, 16, 12))


def finished_rows(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    rows: Tensor,
    block: int,
    *,
    q_scale: Tensor,
    pads: int = 0,
    tail: Tensor | None = None,
    pooled: Pooled | None = None,
) -> Tensor:
    """Some rows of what `blocked.finish` gives for the same arguments, before they are rounded to FP8: float32
    [B, s, H, D]."""
    of = rows // block
    lse, result = lse[..., rows].float(), out[:, rows].float().transpose(1, 2)  # [B, H, s], [B, H, s, D]
    if pads:
        assert tail is not None
        corrected = torch.where(tail[..., of], without_pads(lse, pads), lse)
        result, lse = result * (lse - corrected).exp()[..., None], corrected
    if pooled is None:
        return result.transpose(1, 2)
    assert pooled.sizes is not None
    queries = (q[:, rows].float() * q_scale).transpose(1, 2)
    scores = (queries @ pooled.keys.mT) * q.shape[-1] ** -0.5 + pooled.sizes.log()
    scores.masked_fill_(pooled.kept[:, :, of], float("-inf"))
    total = torch.logaddexp(lse, scores.logsumexp(-1))[..., None]
    read = (lse[..., None] - total).exp()
    means = (scores - total).exp() @ pooled.values
    if pooled.slopes is not None:
        for first in range(0, q.shape[2], HEADS):
            some = slice(first, first + HEADS)
            along = (queries[:, some, :, None] @ pooled.slopes[:, some, of].float())[..., 0, :]
            means[:, some] += (1 - read[:, some]) * along
    return (result * read + means).transpose(1, 2)

"""Text encoding on one rank, with the result sent to all: the encoder is large and a prompt is encoded fast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.models.text.notes import TokenCount
from wan_core.parallel.mesh import RankMesh

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def text_rank(ranks: RankMesh) -> int:
    """The rank that holds the text encoder: the last, because the first writes the results."""
    return ranks.mesh.size - 1


def rows_of_all(ranks: RankMesh | None, rows: Tensor | None) -> Tensor:
    """Text rows [B, S, D] on every rank. rows: the rows on the rank with the text encoder, None on the others."""
    if ranks is None or ranks.world.process is None:
        assert rows is not None
        return rows
    shape = torch.tensor([0] * 4 if rows is None else [*rows.shape, _DTYPES.index(rows.dtype)])
    source = text_rank(ranks)
    dist.broadcast(shape, source, group=ranks.control)
    B, S, D, dtype = shape.tolist()
    if rows is None:
        rows = torch.empty(B, S, D, dtype=_DTYPES[dtype], device=ranks.device)
    rows = rows.contiguous()
    dist.broadcast(rows, source, group=ranks.world.process)
    return rows


def counts_of_all(ranks: RankMesh | None, counts: Sequence[TokenCount] | None, prompts: int) -> list[TokenCount]:
    """Token counts of so many prompts on every rank. counts: on the rank with the text encoder, None on the others."""
    numbers = torch.tensor([(0, 0)] * prompts if counts is None else counts)
    if ranks is not None and ranks.world.process is not None:
        dist.broadcast(numbers, text_rank(ranks), group=ranks.control)
    return [TokenCount(given, read) for given, read in numbers.tolist()]


def kept_of_all(ranks: RankMesh | None, kept: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """float32 of `shape` that the first rank found, on every rank; None where it found none. kept: on the first."""
    if ranks is None or ranks.world.process is None:
        return kept
    there = torch.tensor([kept is not None])
    dist.broadcast(there, 0, group=ranks.control)
    if not there.item():
        return None
    found = torch.empty(tuple(shape), device=ranks.device) if kept is None else kept.to(ranks.device).contiguous()
    dist.broadcast(found, 0, group=ranks.world.process)
    return found

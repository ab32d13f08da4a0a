"""What one rank computes for all: the text encoder is large, and a prompt takes it a moment."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.parallel.mesh import RankMesh

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def text_rank(ranks: RankMesh) -> int:
    """The one that holds the text encoder: the last, because the first has results to write."""
    return ranks.mesh.size - 1


def rows_of_all(ranks: RankMesh | None, rows: Tensor | None) -> Tensor:
    """Text rows [B, S, D] on every rank. rows: given by the rank with the text encoder, None by the others."""
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

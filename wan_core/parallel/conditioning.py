"""Conditioning over ranks: text is encoded on one rank and sent to all, and the branches of guidance run on different
ranks.

The text encoder is large and encodes a prompt fast, so one rank holds it. Where guidance is split, one half of the
ranks runs the conditional branch and the other half the unconditional one. They exchange velocities, float32 and small,
once a step. A step that has one branch only runs it where that branch always runs, and the others receive what came
out: so a branch has all of its past on the ranks that run it, and residual caches need nothing from the other half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.models.text.tokenizer import TokenCount
from wan_core.parallel.mesh import RankMesh, all_gather
from wan_core.sampling.steps import Branch

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def text_rank(ranks: RankMesh) -> int:
    """The rank that holds the text encoder: the last, because the first writes the results."""
    return ranks.mesh.size - 1


def text_of_all(
    ranks: RankMesh | None, read: tuple[Tensor, Sequence[TokenCount]] | None, prompts: int
) -> tuple[Tensor, list[TokenCount]]:
    """Text rows [B, S, D] and token counts of so many prompts, on every rank. read: they, on the rank with the text
    encoder; None on the others."""
    if ranks is None or ranks.world.process is None:
        assert read is not None
        return read[0], list(read[1])
    facts = torch.zeros(4 + 2 * prompts, dtype=torch.long)  # shape and dtype of the rows, then the counts
    if read is not None:
        rows, counts = read[0].contiguous(), [number for count in read[1] for number in count]
        facts = torch.tensor([*rows.shape, _DTYPES.index(rows.dtype), *counts])
    source = text_rank(ranks)
    dist.broadcast(facts, source, group=ranks.control)
    B, S, D, dtype, *numbers = facts.tolist()
    if read is None:
        rows = torch.empty(B, S, D, dtype=_DTYPES[dtype], device=ranks.device)
    dist.broadcast(rows, source, group=ranks.world.process)
    return rows, [TokenCount(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]


def kept_of_all(ranks: RankMesh | None, kept: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """float32 of `shape` that the first rank found, on every rank; None where it found none. kept: on the first."""
    if ranks is None or ranks.world.process is None:
        return kept
    there = torch.tensor([kept is not None])
    dist.broadcast(there, 0, group=ranks.control)
    if not there.item():
        return None
    tensor = torch.empty(tuple(shape), device=ranks.device) if kept is None else kept.to(ranks.device).contiguous()
    dist.broadcast(tensor, 0, group=ranks.world.process)
    return tensor


ORDER: tuple[Branch, ...] = ("cond", "uncond")


class SplitBranches:
    """The `run_branches` of `denoise` where each branch has ranks of its own."""

    def __init__(self, ranks: RankMesh, before_exchange: Callable[[], None] = lambda: None) -> None:
        """before_exchange: called in every step when this rank's blocks have been launched; may raise on all ranks."""
        self.before_exchange = before_exchange
        assert ranks.cfg.size == 2
        self.group, self.device = ranks.cfg, ranks.device
        self.mine: Branch = ORDER[ranks.cfg.index]

    def __call__(
        self, branches: Sequence[Branch], forward: Callable[[Branch], Tensor], velocity: tuple[int, ...]
    ) -> dict[Branch, Tensor]:
        """The velocity of every branch, float32 of the shape `velocity`, the same numbers on every rank. `forward` is
        called for this rank's branch alone."""
        own = forward(self.mine).contiguous() if self.mine in branches else None
        self.before_exchange()
        device = self.device
        if tuple(branches) == ORDER:
            assert own is not None
            both = torch.empty(2 * velocity[0], *velocity[1:], device=device)
            all_gather(both, own, self.group)
            return dict(zip(ORDER, both.chunk(2), strict=True))
        (branch,) = branches
        prediction = torch.empty(velocity, device=device) if own is None else own
        dist.broadcast(prediction, self.group.ranks[ORDER.index(branch)], group=self.group.process)
        return {branch: prediction}

"""The branches of guidance on different ranks: one half of them runs the conditional one, the other half the other.

They exchange velocities, float32 and small, once a step. A step that has one branch only runs it where that branch
always runs, and the others receive what came out: so a branch has all of its past on the ranks that run it, and
residual caches need nothing from the other half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.parallel.mesh import RankMesh, all_gather
from wan_core.sampling.plan import Branch

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
        found = torch.empty(velocity, device=device) if own is None else own
        dist.broadcast(found, self.group.ranks[ORDER.index(branch)], group=self.group.process)
        return {branch: found}

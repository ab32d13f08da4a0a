"""CHORDS, parallel in time: ranks run stretches of one trajectory at the same time, and those that are behind correct
those ahead. Latents alone travel between ranks, some of them in a run: no fast link is needed.

Rank 0 begins at the first step and computes what one rank alone computes. Rank k begins k forwards later at step
`starts[k]`, from one long Euler step of rank k - 1. When rank k - 1 comes to where rank k began, it knows better
latents and a better velocity there: rank k replaces the long step from its beginning to where it is now by one from
there (`rectified`), and where it is now becomes its new beginning. The result is that of the last rank, which is at the
end after T - starts[-1] + ranks - 1 forwards instead of T. It is no exact result: docs/parallel.md has the loss.

Source: Han et al. 2025, arXiv:2507.15260; the beginnings for eight ranks are the published ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.config import OptionError
from wan_core.parallel.mesh import RankMesh
from wan_core.sampling.control import with_passes
from wan_core.sampling.plan import Plan, cut_plan
from wan_core.sampling.schedules import Window
from wan_core.sampling.solvers import History

# Ranks -> where each begins, as a share of the steps.
BEGINNINGS = {
    2: (0.0, 0.32),
    4: (0.0, 0.16, 0.32, 0.64),
    8: (0.0, 0.04, 0.08, 0.16, 0.32, 0.48, 0.64, 0.80),
}


@dataclass(frozen=True)
class Stretches:
    """Which steps each rank runs. starts: its first one; rises by at least one from rank to rank."""

    starts: tuple[int, ...]
    steps: int

    @classmethod
    def of(cls, ranks: int, steps: int) -> Stretches:
        if ranks not in BEGINNINGS:
            allowed = ", ".join(map(str, BEGINNINGS))
            raise OptionError(f"{ranks} ranks given for parallel steps; allowed are {allowed}")
        starts = tuple(round(share * steps) for share in BEGINNINGS[ranks])
        if any(one >= other for one, other in zip(starts, (*starts[1:], steps), strict=True)):
            raise OptionError(f"{steps} steps cannot be shared out over {ranks} ranks: use more steps or fewer ranks")
        return cls(starts, steps)

    @property
    def forwards(self) -> int:
        """What the run takes, in forwards of one rank after the other: `steps` without parallel steps."""
        return self.steps - self.starts[-1] + len(self.starts) - 1

    def end(self, rank: int) -> int:
        """The step before which `rank` stops: all stop with the last one."""
        return self.starts[rank] + self.forwards - rank

    def corrects(self, rank: int, step: int) -> bool:
        """Whether rank + 1 needs what `rank` has at `step`."""
        if rank + 1 == len(self.starts):
            return False
        apart = self.starts[rank + 1] - self.starts[rank]
        behind = step - self.starts[rank + 1]
        return behind >= 0 and behind % apart == 0 and step + apart - 1 < self.end(rank + 1)

    def corrected_from(self, rank: int, step: int) -> int | None:
        """The step whose latents rank - 1 hands to `rank` when that has run `step`; None if it does not."""
        if rank == 0:
            return None
        source = step - (self.starts[rank] - self.starts[rank - 1]) + 1
        return source if self.corrects(rank - 1, source) else None


def check_chords(plan: Plan, ranks: int) -> Stretches:
    """Raise OptionError where `plan` cannot be run in parallel steps."""
    why = None
    if plan.solver != "euler":
        why = f"solver {plan.solver} uses earlier steps, which another rank runs: use solver euler"
    elif plan.sparse is not None:
        why = "it does not go with sparse attention: leave that out"
    elif any(step.skipped for step in plan.steps):
        why = "step caching uses what other ranks computed: leave it out"
    if why is not None:
        raise OptionError(f"steps of this run cannot be shared out over {ranks} ranks (mesh time{ranks}); {why}")
    return Stretches.of(ranks, len(plan.steps))


def stretch_plan(plan: Plan, stretches: Stretches, rank: int) -> Plan:
    """The steps of `rank` as a plan of their own."""
    window = Window(start=stretches.starts[rank], end=stretches.end(rank), leftover=True)
    return with_passes(cut_plan(replace(plan, window=window)))


def euler_step(x: Tensor, velocity: Tensor, sigma: float, sigma_next: float) -> Tensor:
    return x + velocity * (sigma_next - sigma)


def rectified(fine: Tensor, coarse: Tensor, better: Tensor) -> Tensor:
    """What a rank has after its own steps, with the long step over the same stretch replaced. fine: after its steps;
    coarse, better: one long step, from its own beginning and from the latents of the rank before."""
    return (fine - coarse) + better


class TimeStretch:
    """This rank's stretch of a run: its plan, the latents that it begins with, and its solver."""

    def __init__(self, plan: Plan, ranks: RankMesh) -> None:
        self.group, self.sigmas = ranks.time, plan.sigmas
        self.stretches: Stretches = check_chords(plan, self.group.size)
        self.plan = stretch_plan(plan, self.stretches, self.group.index)
        self.origin: tuple[int, Tensor, Tensor] | None = None  # step, latents, velocity: where the long step begins
        self.sent: list[tuple[Any, Tensor]] = []  # tensors stay as they are until they have arrived

    def begin(self, noise: Tensor) -> Tensor:
        """The noisy sample at this rank's first step. noise: that at the first step of all."""
        x = noise.float().contiguous()
        return x if self.group.index == 0 else self._receive(torch.empty_like(x))

    def finish(self, x: Tensor) -> Tensor:
        """The last rank's result, on all ranks."""
        x = x.contiguous()
        dist.broadcast(x, self.group.ranks[-1], group=self.group.process)
        while self.sent:
            self.sent.pop()[0].wait()
        return x

    def solver(
        self, x: Tensor, velocity: Tensor, i: int, sigmas: Sequence[float], history: History
    ) -> tuple[Tensor, History]:
        """Euler's step, corrected where the rank before has come to where this one began."""
        rank, known = self.group.index, self.stretches
        if i == known.starts[rank] and rank + 1 < self.group.size:
            self._send(euler_step(x, velocity, sigmas[i], self.sigmas[known.starts[rank + 1]]))
        if known.corrects(rank, i):
            self._send(torch.stack([x, velocity]))
        if self.origin is None:
            self.origin = i, x, velocity
        x_next = euler_step(x, velocity, sigmas[i], sigmas[i + 1])
        source = known.corrected_from(rank, i)
        if source is not None:
            first, begin, slope = self.origin
            assert first == source, f"the rank before is at step {source}, and this one began at {first}"
            theirs, their_velocity = self._receive(torch.empty_like(torch.stack([x, velocity])))
            coarse = euler_step(begin, slope, sigmas[source], sigmas[i + 1])
            better = euler_step(theirs, their_velocity, sigmas[source], sigmas[i + 1])
            x_next, self.origin = rectified(x_next, coarse, better), None
        return x_next, history

    def _send(self, x: Tensor) -> None:
        x = x.contiguous()
        target = self.group.ranks[self.group.index + 1]
        self.sent.append((dist.isend(x, target, group=self.group.process), x))

    def _receive(self, into: Tensor) -> Tensor:
        dist.recv(into, self.group.ranks[self.group.index - 1], group=self.group.process)
        return into

"""Parallel in time: each rank runs whole forwards of its own stretch of the trajectory (`sampling/chords.py`). Latents
alone travel between ranks, some of them in a run: no fast link is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wan_core.parallel.mesh import RankMesh
from wan_core.sampling.chords import Stretches, check_chords, euler_step, rectified, stretch_plan
from wan_core.sampling.plan import Plan
from wan_core.sampling.solvers import History


class TimeStretch:
    """This rank's stretch of a run: its plan, the latents that it begins with, and its solver."""

    def __init__(self, plan: Plan, ranks: RankMesh) -> None:
        """Raises OptionError."""
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

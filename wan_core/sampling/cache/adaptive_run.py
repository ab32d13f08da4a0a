"""The decisions of the adaptive policy, while a video is made (`wan_core.sampling.cache.policies` says what they
follow).

The host never waits for the step that runs. A rate travels to pinned memory on its own time and is first used `LAG`
steps after its own, fixed, not when it happens to arrive: so that the same seed gives the same video again. By then
the work in question lies before a whole forward that is still queued, and the device has no gap to wait through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wan_core.config import AdaptiveOptions
from wan_core.sampling.plan import Branch, Step

LAG = 2


class Adaptive:
    """Decides for one phase. `decide` before a step, `note` after one that was computed."""

    def __init__(self, options: AdaptiveOptions, steps: int, device: torch.device) -> None:
        self.options = options
        self.cuda = device.type == "cuda"
        self.rates = torch.zeros(steps, pin_memory=self.cuda)  # by the index of the step in the plan
        self.measured: list[tuple[int, Any]] = []  # steps with a rate, and what tells that it has arrived
        self.last: tuple[Step, Tensor] | None = None  # the newest computed step and its velocity
        self.computed: dict[Branch, int] = {}  # the last step that computed the branch
        self.decided: dict[int, bool] = {}  # by step: a step that is run again does what it did

    def decide(self, step: Step) -> bool:
        """Whether `step` reuses the last residual. Decided once: after out of memory a step runs again, and the buffer
        that a second decision might reuse is half overwritten by then."""
        if step.index not in self.decided:
            self.decided[step.index] = self._decide(step)
        return self.decided[step.index]

    def _decide(self, step: Step) -> bool:
        rate = self._rate(step.index - LAG)
        skip = (
            step.action == "adaptive"
            and self.last is not None
            and rate is not None
            and all(step.index - self.computed[branch] <= self.options.max_skips for branch in step.branches)
            and rate * (self.last[0].sigma - step.sigma) < self.options.threshold
        )
        if not skip:
            self.computed |= dict.fromkeys(step.branches, step.index)
        return skip

    def note(self, step: Step, velocity: Tensor) -> None:
        """`velocity` of a computed step, of the conditional branch."""
        if self.last is not None and self.last[1].shape == velocity.shape:
            before, reference = self.last
            change = (velocity - reference).norm() / reference.norm() / (before.sigma - step.sigma)
            self.rates[step.index].copy_(change, non_blocking=True)
            self.measured.append((step.index, self._mark()))
        self.last = step, velocity

    def _rate(self, newest: int) -> float | None:
        """The newest rate of a step up to `newest`, arrived long ago but for the shortest of steps."""
        earlier = [(index, mark) for index, mark in self.measured if index <= newest]
        if not earlier:
            return None
        index, mark = earlier[-1]
        if mark is not None:
            mark.synchronize()
        return float(self.rates[index])

    def _mark(self) -> Any:
        if not self.cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

"""The decisions of the adaptive policy, while a video is made (`wan_core.sampling.cache.policies` says what they
follow).

The host never waits for the step that runs. A number travels to pinned memory on its own time and is first used `LAG`
steps after its own, fixed, not when it happens to arrive: so that the same seed gives the same video again. By then
the work in question lies before a whole forward that is still queued, and the device has no gap to wait through.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wan_core.config import AdaptiveOptions
from wan_core.sampling.cache.policies import LAG, Judged, Judgement, judged_words, remainder
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.measured import RankSums
from wan_core.sampling.steps import Branch, Step


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
        """Whether `step` is skipped. Decided once: after out of memory a step runs again, and the buffer that a second
        decision might reuse is half overwritten by then."""
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

    def judges(self, step: Step) -> bool:
        """Whether the forecast of a computed `step` is wanted, before its blocks run."""
        return False

    def note(self, step: Step, velocity: Tensor, forecast: Tensor | None = None) -> None:
        """`velocity` of a computed step, of the conditional branch, or guided where `forecast` is what the step would
        have had without its blocks."""
        if self.last is not None and self.last[1].shape == velocity.shape:
            before, reference = self.last
            change = (velocity - reference).norm() / reference.norm() / (before.sigma - step.sigma)
            self._send(step.index, change)
        self.last = step, velocity

    def words(self) -> str:
        """One line about the phase for the report; "" where there is nothing to say."""
        return ""

    def _send(self, index: int, number: Tensor) -> None:
        self.rates[index].copy_(number, non_blocking=True)
        self.measured.append((index, self._mark()))

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


class BoundedCache(Adaptive):
    """Decides for one phase by the judged error of forecasts: `wan_core.sampling.cache.policies` has the rule."""

    def __init__(
        self, options: AdaptiveOptions, steps: int, device: torch.device, ranks: RankSums | None = None
    ) -> None:
        """ranks: those that run the video together, on which the same numbers are judged."""
        super().__init__(options, steps, device)
        self.ranks, self.rule = ranks, Judged(options)
        self.judged: dict[int, float] = {}  # by step: the remainder of its forecast

    def _decide(self, step: Step) -> bool:
        newest = [index for index, _ in self.measured if index <= step.index - LAG and index in self.judged][-2:]
        known = [
            Judgement(index, error, self.judged[index]) for index in newest if (error := self._rate(index)) is not None
        ]
        return self.rule.decide(step, known)

    def judges(self, step: Step) -> bool:
        return step.action == "adaptive" and self.rule.sources(step, before=step.index) is not None

    def note(self, step: Step, velocity: Tensor, forecast: Tensor | None = None) -> None:
        if forecast is not None:
            self.judge(step, torch.stack([(forecast - velocity).square().sum(), velocity.square().sum()]))

    def judge(self, step: Step, sums: Tensor) -> None:
        """A computed step. sums: of squares [2], of what its forecast is off by and of its velocity."""
        past = self.rule.sources(step, before=step.index)
        if past is None or step.index in self.judged:
            return
        self.judged[step.index] = remainder(past, step.index)
        sums = sums if self.ranks is None else self.ranks.over_forward(sums, True)
        self._send(step.index, (sums[0] / sums[1]).sqrt())

    def words(self) -> str:
        errors = {index: error for index in self.judged if (error := self._rate(index)) is not None}
        return judged_words(self.rule, errors)


def adaptive_phase(
    plan: Plan, phase: tuple[Step, ...], device: torch.device, ranks: RankSums | None = None, steps: int | None = None
) -> Adaptive | None:
    """What decides for the steps of `phase`; None where the plan has decided. steps: of the whole schedule, where
    `plan` is a part of it."""
    if plan.adaptive is None or not any(step.action == "adaptive" for step in phase):
        return None
    steps = len(plan.steps) if steps is None else steps
    return (
        BoundedCache(plan.adaptive, steps, device, ranks)
        if plan.adaptive.rule == "bound"
        else Adaptive(plan.adaptive, steps, device)
    )

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
from wan_core.sampling.steps import Step


class Adaptive:
    """Decides for one phase by the judged error of forecasts: `wan_core.sampling.cache.policies` has the rule. `decide`
    before a step, `note` after one that was computed."""

    def __init__(
        self, options: AdaptiveOptions, steps: int, device: torch.device, ranks: RankSums | None = None
    ) -> None:
        """ranks: those that run the video together, on which the same numbers are judged."""
        self.ranks, self.rule = ranks, Judged(options)
        self.cuda = device.type == "cuda"
        self.errors = torch.zeros(steps, pin_memory=self.cuda)  # by the index of the step in the plan
        self.measured: list[tuple[int, Any]] = []  # steps with an error, and what tells that it has arrived
        self.judged: dict[int, float] = {}  # by step: the remainder of its forecast
        self.decided: dict[int, bool] = {}  # by step: a step that is run again does what it did

    def decide(self, step: Step) -> bool:
        """Whether `step` is skipped. Decided once: after out of memory a step runs again, and the buffer that a second
        decision might reuse is half overwritten by then."""
        if step.index not in self.decided:
            newest = [index for index, _ in self.measured if index <= step.index - LAG][-2:]
            self.decided[step.index] = self.rule.decide(
                step, [Judgement(index, self._error(index), self.judged[index]) for index in newest]
            )
        return self.decided[step.index]

    def judges(self, step: Step) -> bool:
        """Whether the forecast of a computed `step` is wanted, before its blocks run."""
        return step.action == "adaptive" and self.rule.sources(step, before=step.index) is not None

    def note(self, step: Step, velocity: Tensor, forecast: Tensor) -> None:
        """The guided `velocity` of a computed step, and what it would have been without its blocks."""
        self.judge(step, torch.stack([(forecast - velocity).square().sum(), velocity.square().sum()]))

    def judge(self, step: Step, sums: Tensor) -> None:
        """A computed step. sums: of squares [2], of what its forecast is off by and of its velocity."""
        past = self.rule.sources(step, before=step.index)
        if past is None or step.index in self.judged:
            return
        self.judged[step.index] = remainder(past, step.index)
        sums = sums if self.ranks is None else self.ranks.over_forward(sums, True)
        self.errors[step.index].copy_((sums[0] / sums[1]).sqrt(), non_blocking=True)
        self.measured.append((step.index, self._mark()))

    def words(self) -> str:
        """One line about the phase for the report."""
        return judged_words(self.rule, {index: self._error(index) for index in self.judged})

    def _error(self, step: int) -> float:
        """The error that was measured in a step, arrived long ago but for the shortest of steps."""
        mark = dict(self.measured)[step]
        if mark is not None:
            mark.synchronize()
        return float(self.errors[step])

    def _mark(self) -> Any:
        if not self.cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event


def adaptive_phase(
    plan: Plan, phase: tuple[Step, ...], device: torch.device, ranks: RankSums | None = None, steps: int | None = None
) -> Adaptive | None:
    """What decides for the steps of `phase`; None where the plan has decided. steps: of the whole schedule, where
    `plan` is a part of it."""
    if plan.adaptive is None or not any(step.action == "adaptive" for step in phase):
        return None
    return Adaptive(plan.adaptive, len(plan.steps) if steps is None else steps, device, ranks)

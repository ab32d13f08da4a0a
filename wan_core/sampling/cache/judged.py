"""The rule of bounded step caching: which steps are skipped, from the errors of forecasts that the run judged. Pure
functions of numbers, without torch.

A skipped step forecasts the residual of the blocks by the polynomial through the last `FORECAST` + 1 computed ones.
Every computed step that could have been forecast is judged: the guided velocity that the forecast would have given is
compared with the computed one, ||forecast - velocity|| / ||velocity||.

1. The error of a forecast is taken to be proportional to its remainder, the product of the distances of the step from
   those that it is forecast from, as of a polynomial through points of a smooth function.
2. A step is skipped if its expected error is at most `MARGIN` times the bound: the larger of what the newest two
   judgements expect, which are at least two steps old. The first steps of a run have a third of the bound.
3. At most `max_skips` steps are skipped in a row.

What a step measured is used a fixed number of steps later: a seed gives the same video again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from wan_core.config import AdaptiveOptions
from wan_core.sampling.cache.policies import FORECAST
from wan_core.sampling.plan import Branch, Plan, Step

MARGIN = 0.9
LAG = 2  # steps after which a judgement is used


class Judgement(NamedTuple):
    """The error of the forecast of a computed step, and its remainder."""

    step: int
    error: float
    remainder: float


class Judged:
    """Decides for the steps of one expert at one size."""

    def __init__(self, options: AdaptiveOptions) -> None:
        self.options = options
        self.computed: dict[Branch, list[int]] = {}
        self.skipped: dict[int, float] = {}  # by step: its expected error
        self.ran: list[int] = []
        self.row = 0  # steps skipped in a row
        self.began = 0  # judgements of steps before do not count
        self.kind: object = None

    def sources(self, step: Step, before: int) -> list[int] | None:
        """The steps from which a branch of `step` is forecast, of the branch with the farthest; None: too few."""
        count = math.ceil(FORECAST) + 1
        found = [[i for i in self.computed.get(branch, ()) if i < before][-count:] for branch in step.branches]
        return None if any(len(past) < count for past in found) else min(found)

    def decide(self, step: Step, known: Sequence[Judgement]) -> bool:
        """Whether `step` is skipped. known: the newest judgements that may be used."""
        if step.kind != self.kind:  # nothing that was kept of another size can be used
            self.kind, self.computed, self.row, self.began = step.kind, {}, 0, step.index
        past, known = self.sources(step, before=step.index), [one for one in known if one.step >= self.began]
        if step.action == "adaptive" and past is not None and known and self.row < self.options.max_skips:
            expected = remainder(past, step.index) * max(one.error / one.remainder for one in known)
            if expected <= MARGIN * step.forecast_bound:  # never where it is not a number
                self.skipped[step.index], self.row = expected, self.row + 1
                return True
        self.ran.append(step.index)
        self.row = 0
        for branch in step.branches:
            self.computed.setdefault(branch, []).append(step.index)
        return False


def fewest_forwards(plan: Plan) -> int:
    """How many forwards a plan takes where every forecast is exact."""
    count = 0
    for phase in plan.phases:
        assert plan.adaptive is not None
        rule, judged = Judged(plan.adaptive), list[int]()
        for step in phase:
            known = [Judgement(index, 0.0, 1.0) for index in judged if index <= step.index - LAG]
            if not rule.decide(step, known):
                count += step.forwards
                judged += [step.index] if step.action == "adaptive" else []
    return count


def remainder(past: Sequence[int], now: int) -> float:
    """What the error of a forecast is proportional to."""
    return float(math.prod(now - index for index in past))


def judged_words(rule: Judged, errors: Mapping[int, float]) -> str:
    """One line about a phase for the report. errors: of judged steps."""
    count = len(rule.ran) + len(rule.skipped)
    words = f"step cache: {len(rule.ran)} of {count} steps computed"
    if not rule.skipped:
        return words
    expected = fmean(rule.skipped.values())
    bound, judged = rule.options.threshold, fmean(errors.values())
    return (
        f"{words}, expected error of the others {expected:.2g} of {bound:g}, of forecasts at computed ones {judged:.2g}"
    )

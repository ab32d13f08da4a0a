"""Policies that mark the steps of a plan: the step caches that need no measured curve.

**TaylorSeer**: compute every n-th step and forecast the residual of the blocks in between. A forecast of order m
extrapolates the polynomial through the last m + 1 computed residuals of the same branch and expert. For equally spaced
steps this is the finite-difference form of the Taylor series. The plan knows the distances between computed steps, so
the forecast is a weighted sum with constant weights (`wan_core.sampling.cache.residual`). Source: Liu et al., "From
Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", 2025, arXiv:2503.06923, which forecasts inside
each block. Forecasting the sum of all blocks needs a hundredth of the memory.

**Adaptive cache**: the plan marks the steps that may be skipped, and `wan_core.sampling.cache.adaptive_run` decides
during the run, because the rule reads tensors. A skipped step forecasts the residual of the blocks by the polynomial
through the last `FORECAST` + 1 computed ones. Every computed step that could have been forecast is judged: the guided
velocity that the forecast would have given is compared with the computed one, ||forecast - velocity|| / ||velocity||.

1. The error of a forecast is taken to be proportional to its remainder, the product of the distances of the step from
   those that it is forecast from, as of a polynomial through points of a smooth function.
2. A step is skipped if its expected error is at most `MARGIN` times the bound: the larger of what the newest two
   judgements expect, which are at least two steps old. The first steps of a run have a third of the bound.
3. At most `max_skips` steps are skipped in a row.

What a step measured is used a fixed number of steps later: a seed gives the same video again. Imports no torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from statistics import fmean
from typing import NamedTuple

from wan_core.config import AdaptiveOptions, TaylorSeerOptions
from wan_core.sampling.cache.magcache import mark, retained
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.schedule import EARLY
from wan_core.sampling.steps import Branch, Step

FORECAST = 1  # order of the adaptive cache's forecasts
EARLY_STEPS = 0.3  # share of the steps, from the first one, that have a part of the bound: they fix the layout


def skip_taylorseer(plan: Plan, options: TaylorSeerOptions) -> Plan:
    """`plan` with its forecast steps marked. The retained steps of an expert and the video's last step are computed."""
    skipped: list[tuple[Branch, ...]] = []
    for phase in plan.phases:
        keep = retained(len(phase), options.retention)
        computed: dict[Branch, int] = {}  # index of the last step of this expert that computed the branch
        for at, step in enumerate(phase):
            # Each branch has its own age: one that runs only in some steps might otherwise never be computed.
            recent = all(b in computed and step.index - computed[b] < options.interval for b in step.branches)
            skip = at >= keep and recent and not step.finishes
            computed |= {} if skip else dict.fromkeys(step.branches, step.index)
            skipped.append(step.branches if skip else ())
    return mark(plan, skipped, options.order)


def mark_adaptive(plan: Plan, options: AdaptiveOptions) -> Plan:
    """`plan` with the steps marked that may be skipped: never the retained steps of an expert or the video's last."""
    steps: list[Step] = []
    early = ceil(EARLY_STEPS * len(plan.steps) - 1e-9)
    for phase in plan.phases:
        keep = retained(len(phase), options.retention)
        cached: Counter[Branch] = Counter()  # steps of this expert by branch
        for at, step in enumerate(phase):
            enough = all(cached[branch] > FORECAST for branch in step.branches)
            may_skip = at >= keep and not step.finishes and enough
            cached.update(step.branches)
            if may_skip:
                bound = options.threshold * (EARLY if step.index < early else 1)
                step = replace(step, action="adaptive", skipped=step.branches, order=FORECAST, forecast_bound=bound)
            steps.append(step)
    return replace(plan, steps=tuple(steps), adaptive=options)


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

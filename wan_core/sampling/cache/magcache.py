"""MagCache as a static policy: which steps of a plan reuse the last residual, decided by a curve of magnitudes.

A reused residual is too large or too small by the product of the ratios since it was computed. A step may be skipped
while the sum of |1 - product| over the steps since then stays below `threshold`, and at most `max_skips` steps are
skipped in a row. Each guidance branch decides for itself, as settings such as E012K2R20 were published.

The residual is the sum that all blocks add to the tokens; `curves` says what a curve holds.

Source: Ma et al., "MagCache: Fast Video Generation with Magnitude-Aware Cache", 2025, arXiv:2506.09045, and
MagCache4Wan2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from wan_core.config import MagCacheOptions
from wan_core.sampling.cache.curves import Curve
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Branch, Step

BRANCHES: tuple[Branch, ...] = ("cond", "uncond")


def skip_magcache(plan: Plan, options: MagCacheOptions, curve: Curve) -> Plan:
    """`plan` with the steps marked that MagCache skips."""
    return mark(plan, published_rule(plan, options, curve), forecasts=False)


def mark(plan: Plan, skipped: Sequence[tuple[Branch, ...]], *, forecasts: bool) -> Plan:
    """`plan` with the branches `skipped[i]` of step i skipped. forecasts: from two residuals, as soon as an expert has
    computed two; otherwise the last one is used again."""
    steps: list[Step] = []
    for phase in plan.phases:
        computed: dict[Branch, int] = dict.fromkeys(BRANCHES, 0)
        for step in phase:
            branches = skipped[step.index]
            two = forecasts and max((computed[branch] for branch in branches), default=0) > 1
            for branch in set(step.branches) - set(branches):
                computed[branch] += 1
            action = "forecast" if two else "reuse"
            steps.append(replace(step, action=action, skipped=branches) if branches else step)
    return replace(plan, steps=tuple(steps))


def retained(steps: int, retention: float) -> int:
    """Number of steps at the start of an expert's phase that are always computed: at least one."""
    return max(1, ceil(steps * retention - 1e-9))


@dataclass(frozen=True)
class Drift:
    """State of a residual since it was computed: product of the ratios, accumulated error, number of steps."""

    ratio: float = 1.0
    error: float = 0.0
    steps: int = 0

    def after(self, ratio: float | None) -> Drift:
        """The state one step later. An unknown ratio (None) makes the error infinite, so no threshold allows it."""
        product = self.ratio * (float("inf") if ratio is None else ratio)
        return Drift(product, self.error + abs(1 - product), self.steps + 1)

    def allows(self, options: MagCacheOptions) -> bool:
        return self.error < options.threshold and self.steps <= options.max_skips


def published_rule(plan: Plan, options: MagCacheOptions, curve: Curve) -> list[tuple[Branch, ...]]:
    """The branches that each step skips: each branch decides separately, errors continue over
    the boundary, retention counts forwards (conditional, unconditional, ...), image-to-video computes all high-noise
    steps, and the last step may be skipped. Differences to the publication: a branch without a residual of the running
    expert is computed; where a step has one branch, the residual of the other ages by that step.
    """
    same = curve.steps == len(plan.steps)
    ratios = {b: getattr(curve, b) if same else nearest(getattr(curve, b), len(plan.steps)) for b in BRANCHES}
    drifts: dict[Branch, Drift] = dict.fromkeys(BRANCHES, Drift())
    skipped: list[tuple[Branch, ...]] = []
    for phase in plan.phases:
        cached: set[Branch] = set()  # branches with a residual of this expert
        for step in phase:
            skip: list[Branch] = []
            for branch in step.branches:
                if _eligible(plan, 2 * step.index + BRANCHES.index(branch), options.retention):
                    drifts[branch] = drifts[branch].after(ratios[branch][step.index])
                    if drifts[branch].allows(options) and branch in cached:
                        skip.append(branch)
                    else:
                        drifts[branch] = Drift()
            drifts |= {b: drifts[b].after(ratios[b][step.index]) for b in cached - set(step.branches)}
            cached |= set(step.branches) - set(skip)
            skipped.append(tuple(skip))
    return skipped


def _eligible(plan: Plan, count: int, retention: float) -> bool:
    """Whether retention allows skipping forward number `count`."""
    forwards = 2 * len(plan.steps)
    if len(plan.steps_of_experts) == 1:
        return count >= int(forwards * retention)
    split = 2 * len(plan.steps_of_experts[0])
    if plan.task is not None and plan.task.image == "channels":
        return count >= int(split + (forwards - split) * retention)
    return count >= int(split * retention) and not split <= count <= (forwards - split) * retention + split


def nearest(values: Sequence[float], count: int) -> list[float]:
    """`values` resampled to `count` values, first and last kept: index round(i * (len - 1) / (count - 1))."""
    last = len(values) - 1
    if count < 2:
        return list(values[-count:]) if count else []
    return [values[round(i * last / (count - 1))] for i in range(count)]

"""MagCache as a static policy: which steps of a plan reuse the last residual, from a curve of magnitudes alone.

While steps are skipped, the residual that is reused is too large or small by the product of the ratios since it was
computed. A step may be skipped while the sum of |1 - product| over the steps since then stays below `threshold`, and
no more than `max_skips` are skipped in a row.

Two rules say who decides:

joint       (default) both guidance branches, together: a step is skipped if each of them may be. State begins anew
            with each expert; the first `retention` of every phase, its first step at least, and the last step of the
            video are computed. Resampling to other step counts happens within each phase.
published   the rule that the numbers E012K2R20 and the like were published with, for comparison. Each branch decides
            for itself, errors go on over the boundary, retention counts forwards, image-to-video computes the
            whole high-noise phase, and the last step may be skipped. One thing differs from it: a branch that has no
            residual of the running expert computes.

Source: Ma et al., "MagCache: Fast Video Generation with Magnitude-Aware Cache", 2025, arXiv:2506.09045, and
MagCache4Wan2.2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from wan_core.config import MagCacheOptions, OptionError
from wan_core.models.wan.tasks import find_task
from wan_core.sampling.cache.curves import Curve, nearest
from wan_core.sampling.plan import Branch, Plan, Step

Ratios = Mapping[Branch, Sequence["float | None"]]
# A forecast in place of the last residual, and one skip in a row rather than two where quality counts: on the embedded
# model this beats everything else that saves as much (benchmarks/results/quality-*.json, docs/performance.md). Order 2
# keeps three residuals of each branch.
PRESETS: dict[str, MagCacheOptions] = {
    "quality": MagCacheOptions(threshold=0.06, max_skips=1, retention=0.2, order=2),
    "balanced": MagCacheOptions(threshold=0.24, max_skips=1, retention=0.1, order=2),
    "fast": MagCacheOptions(threshold=0.24, max_skips=2, retention=0.1, order=2),
}
_NUMBERS = re.compile(r"([\d.]+)/(\d+)/([\d.]+)")
_NAME = re.compile(r"E(\d)(\d\d)K(\d+)R(\d\d)", re.IGNORECASE)


def parse_magcache(text: str, *, rule: str = "joint", order: int | None = None) -> MagCacheOptions:
    """A preset's name, `threshold/skips/retention` as 0.12/2/0.2, or the same as E012K2R20. Raises OptionError.

    order: of the forecast; None is the preset's own, and 0 for numbers, as published.
    """
    if text in PRESETS:
        return replace(PRESETS[text], rule=rule, order=PRESETS[text].order if order is None else order)
    numbers, name = _NUMBERS.fullmatch(text), _NAME.fullmatch(text)
    try:
        if numbers:
            threshold, skips, retention = float(numbers[1]), int(numbers[2]), float(numbers[3])
        elif name:
            threshold, skips, retention = float(f"{name[1]}.{name[2]}"), int(name[3]), int(name[4]) / 100
        else:
            raise ValueError
    except ValueError:
        raise OptionError(
            f"magcache {text!r} given; use {', '.join(PRESETS)}, or threshold/skips in a row/retention such as "
            "0.12/2/0.2 (published as E012K2R20)"
        ) from None
    return MagCacheOptions(threshold=threshold, max_skips=skips, retention=retention, rule=rule, order=order or 0)


def skip_magcache(plan: Plan, options: MagCacheOptions, curve: Curve) -> Plan:
    """`plan` with its skipped steps marked."""
    if options.rule == "joint":
        skipped = joint_rule(plan, options, curve.for_plan(plan))
    else:
        skipped = published_rule(plan, options, curve)
    return mark(plan, skipped, options.order)


def mark(plan: Plan, skipped: Sequence[tuple[Branch, ...]], order: int) -> Plan:
    """`plan` with these branches of each step skipped: by a forecast of `order`, of a lower one where fewer residuals
    have been computed in the phase, by reuse where there is one."""
    steps: list[Step] = []
    for phase in plan.phases:
        computed: dict[Branch, int] = dict.fromkeys(BRANCHES, 0)
        for step in phase:
            gone = skipped[step.index]
            reach = min(order, max((computed[branch] for branch in gone), default=1) - 1)
            for branch in set(step.branches) - set(gone):
                computed[branch] += 1
            action = "forecast" if reach else "reuse"
            steps.append(replace(step, action=action, skipped=gone, order=reach) if gone else step)
    return replace(plan, steps=tuple(steps))


def retained(steps: int, retention: float) -> int:
    """How many steps at the start of a phase always compute: one at least."""
    return max(1, ceil(steps * retention - 1e-9))


# --------------------------------------------------------------------------------------------------------------- rules


@dataclass(frozen=True)
class Drift:
    """What has become of a residual since it was computed: the product of ratios, the error so far, the steps."""

    ratio: float = 1.0
    error: float = 0.0
    steps: int = 0

    def after(self, ratio: float | None) -> Drift:
        """One step on; None is a ratio that is not known, which no threshold allows."""
        product = self.ratio * (float("inf") if ratio is None else ratio)
        return Drift(product, self.error + abs(1 - product), self.steps + 1)

    def allows(self, options: MagCacheOptions) -> bool:
        return self.error < options.threshold and self.steps <= options.max_skips


def joint_rule(plan: Plan, options: MagCacheOptions, ratios: Ratios) -> list[tuple[Branch, ...]]:
    """The branches that each step skips: all of them or none."""
    skipped: list[tuple[Branch, ...]] = []
    for phase in plan.phases:
        drifts: dict[Branch, Drift] = {}  # of the branches that have a residual of this expert
        keep = retained(len(phase), options.retention)
        for at, step in enumerate(phase):
            drifts = {branch: drift.after(ratios[branch][step.index]) for branch, drift in drifts.items()}
            free = at >= keep and step is not plan.steps[-1]
            skip = free and all(b in drifts and drifts[b].allows(options) for b in step.branches)
            if not skip:
                drifts |= {branch: Drift() for branch in step.branches}
            skipped.append(step.branches if skip else ())
    return skipped


def published_rule(plan: Plan, options: MagCacheOptions, curve: Curve) -> list[tuple[Branch, ...]]:
    """The branches that each step skips. Forwards are counted as there: conditional, unconditional, conditional, ...

    A branch that a guidance schedule leaves out of a step grows older with it, as nothing there does.
    """
    same = curve.steps == len(plan.steps)
    ratios = {b: getattr(curve, b) if same else nearest(getattr(curve, b), len(plan.steps)) for b in BRANCHES}
    drifts: dict[Branch, Drift] = dict.fromkeys(BRANCHES, Drift())
    skipped: list[tuple[Branch, ...]] = []
    for phase in plan.phases:
        held: set[Branch] = set()  # branches with a residual of this expert
        for step in phase:
            now: list[Branch] = []
            for branch in step.branches:
                if _eligible(plan, 2 * step.index + BRANCHES.index(branch), options.retention):
                    drifts[branch] = drifts[branch].after(ratios[branch][step.index])
                    if drifts[branch].allows(options) and branch in held:
                        now.append(branch)
                    else:
                        drifts[branch] = Drift()
            drifts |= {b: drifts[b].after(ratios[b][step.index]) for b in held - set(step.branches)}
            held |= set(step.branches) - set(now)
            skipped.append(tuple(now))
    return skipped


BRANCHES: tuple[Branch, ...] = ("cond", "uncond")


def _eligible(plan: Plan, count: int, retention: float) -> bool:
    """Whether forward number `count` may be skipped at all."""
    forwards = 2 * len(plan.steps)
    if len(plan.phases) == 1:
        return count >= int(forwards * retention)
    split = 2 * len(plan.phases[0])
    if find_task(plan.task).image == "channels":
        return count >= int(split + (forwards - split) * retention)
    return count >= int(split * retention) and not split <= count <= (forwards - split) * retention + split

"""The plan of a run whose steps another program walks: a sampler that hands each model a part of a schedule.

A sampler tells the sigmas of its own part. The policies of step caching and sparse attention count steps of the whole
run, so `find_part` places the part in it: from the whole schedule or the number of its steps where the user gave them,
otherwise from the share of the noise levels that the part covers. `plan_part` makes the plan of the whole run, as the
plan preview shows it, and `cut` the plan of the part, in which no step uses what was computed outside it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isclose

from wan_core.config import OptionError, SkipOptions
from wan_core.sampling.plan import Branch, Expert, Plan, Step

CLOSE = 1e-4  # relative; sigmas travel as float32 and pass through samplers' own arithmetic


@dataclass(frozen=True)
class Part:
    """The steps `start` to `stop` (exclusive) of a run with the sigmas `whole`, which end in the last step's target."""

    whole: tuple[float, ...]
    start: int
    stop: int

    @property
    def total(self) -> int:
        return len(self.whole) - 1

    def step_at(self, sigma: float) -> tuple[int, bool]:
        """The step of this part in which a sampler is that evaluates the model at `sigma`, and whether it is at the
        step's beginning: samplers of higher order also evaluate between two sigmas, or the end of a step."""
        index = self.start
        for i in range(self.start, self.stop):
            if self.whole[i] < sigma and not isclose(self.whole[i], sigma, rel_tol=CLOSE / 10):
                break
            index = i
        return index, isclose(self.whole[index], sigma, rel_tol=CLOSE / 10)


def find_part(
    sigmas: Sequence[float], levels: Sequence[float], *, steps: int = 0, schedule: Sequence[float] = ()
) -> Part:
    """Where the steps with `sigmas` (falling, one more than steps) are in the whole run.

    levels: the noise levels that the model was trained on, rising. steps: of the whole run; 0: estimated. schedule: the
    sigmas of the whole run, if they are known. Raises OptionError where these do not fit together.
    """
    count = len(sigmas) - 1
    if count < 1 or any(after >= before for before, after in pairwise(sigmas)):
        raise OptionError(f"step caching needs sigmas that fall from step to step; the sampler's are {_words(sigmas)}")
    if schedule:
        return _find_in(sigmas, schedule)
    shares = [bisect_left(levels, sigma * (1 - CLOSE)) + 1 for sigma in sigmas[:-1]]
    first, last = shares[0] / len(levels), 0.0 if sigmas[-1] == 0 else bisect_left(levels, sigmas[-1] * (1 - CLOSE)) + 1
    last /= len(levels)
    total = steps or max(count, round(count / max(first - last, 1 / len(levels))))
    if count > total:
        raise OptionError(f"steps {steps} given for the whole run, but this sampler alone runs {count}: 0 estimates it")
    start = total - count if sigmas[-1] == 0 else min(round(total * (1 - first)), total - count)
    before = [level_at(levels, 1 - i / total) for i in range(start)]
    rest = total - start - count
    after = [level_at(levels, last * (1 - i / rest)) for i in range(1, rest)] + [0.0] * (rest > 0)
    return Part((*before, *sigmas, *after), start, start + count)


def level_at(levels: Sequence[float], share: float) -> float:
    """The noise level at this share (0..1) of the levels."""
    return levels[max(0, min(len(levels) - 1, round(share * len(levels)) - 1))]


def _find_in(sigmas: Sequence[float], schedule: Sequence[float]) -> Part:
    count = len(sigmas) - 1
    for start in range(len(schedule) - count):
        # The target of the last step may be 0 where the schedule goes on: samplers can be told to remove all noise.
        if all(isclose(a, b, rel_tol=CLOSE) for a, b in zip(sigmas[:-1], schedule[start:], strict=False)):
            whole = (*schedule[:start], *sigmas, *schedule[start + count + 1 :])
            return Part(whole if sigmas[-1] else whole[: start + count + 1], start, start + count)
    raise OptionError(
        f"the sampler's sigmas {_words(sigmas)} are no part of the whole schedule {_words(schedule)}: connect the "
        "SIGMAS that the samplers' steps are made of, or none"
    )


def _words(sigmas: Sequence[float]) -> str:
    shown = [f"{sigma:.4g}" for sigma in sigmas]
    return ", ".join(shown if len(shown) < 6 else [*shown[:3], "...", *shown[-2:]])


def plan_part(
    part: Part,
    *,
    task: str,
    solver: str,
    shift: float,
    boundary: float,
    guidance: float,
    branches: tuple[Branch, ...],
) -> Plan:
    """The plan of the whole run, without skipped steps.

    boundary: of the task, 0 where one transformer runs every step. A part of a run of two experts is the part of one of
    them; a sampler that runs from the first step to the last runs both ranges with one model, and then, as within the
    range of one expert, the boundary decides.
    """
    sigmas, split = part.whole, 0
    if boundary:
        at_boundary = sum(sigma >= boundary for sigma in sigmas[:-1])
        starts, ends = part.start == 0, part.stop == part.total
        split = at_boundary if starts == ends else part.stop if starts else part.start
        if starts == ends and not starts:  # in the middle
            split = max(split, part.stop) if sigmas[part.start] >= boundary else min(split, part.start)
        boundary = boundary if split == at_boundary else between(sigmas, split)

    def expert(index: int) -> Expert:
        return "high" if index < split or not boundary else "low"

    steps = tuple(
        Step(
            index=i,
            timestep=1000 * sigma,
            sigma=sigma,
            sigma_next=sigmas[i + 1],
            expert=expert(i),
            guidance=guidance,
            branches=branches,
        )
        for i, sigma in enumerate(sigmas[:-1])
    )
    return Plan(task=task, solver=solver, shift=shift, boundary=boundary, steps=steps)


def between(sigmas: Sequence[float], split: int) -> float:
    """The boundary with which the high-noise expert runs the steps before `split`."""
    return round((sigmas[split - 1] + sigmas[split]) / 2, 6)


def cut(plan: Plan, part: Part) -> Plan:
    """The steps of `part` alone: a skipped branch whose residuals would come from outside it is computed, and a
    forecast uses as many as there are."""
    steps: list[Step] = []
    for phase in plan.phases:
        computed: dict[Branch, int] = {}
        for step in phase:
            if not part.start <= step.index < part.stop:
                continue
            if not set(step.skipped) <= computed.keys():
                step = replace(step, action="compute", skipped=(), order=0)
            elif step.action == "forecast":
                order = min(step.order, *(computed[branch] - 1 for branch in step.skipped))
                step = replace(step, action="forecast" if order else "reuse", order=order)
            skipped = () if step.action == "adaptive" else step.skipped
            for branch in set(step.branches) - set(skipped):
                computed[branch] = computed.get(branch, 0) + 1
            steps.append(step)
    return replace(plan, steps=tuple(steps), unskipped=sum(len(step.branches) for step in steps))


def check_external(options: SkipOptions) -> None:
    """Raises OptionError for what only this engine's own loop can do."""
    if options.guidance is not None:
        raise OptionError(
            "the guidance schedule belongs to the WanCore sampler: with another sampler, disconnect WanCore Guidance "
            "Schedule and end guidance with the sampler's own nodes"
        )
    if options.magcache is not None and options.magcache.rule != "joint":
        raise OptionError(
            "the rule 'published' counts forwards of the WanCore sampler: choose 'joint' for another sampler"
        )

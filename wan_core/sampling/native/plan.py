"""The plan of a run of which a sampler walks a part.

A sampler tells the sigmas of its own part. The policies of step caching count steps of the whole run: `WholeRun.place`
finds the part in it, `plan_part` makes the plan of the whole run, as the plan preview shows it, and `cut` the plan of
the part, in which no step uses what was computed outside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isclose

from wan_core.config import OptionError, SkipOptions
from wan_core.sampling.native.schedule import SchedulePart, find_part, unshifted
from wan_core.sampling.plan import Branch, Expert, Plan, Step
from wan_core.sampling.schedules import shifted

CLOSE = 1e-4  # relative; sigmas travel as float32 and pass through samplers' own arithmetic


@dataclass(frozen=True)
class Part(SchedulePart):
    """A part of a run whose sigmas are known: `whole` ends in the target of the last step."""

    whole: tuple[float, ...]

    @property
    def stop(self) -> int:
        """The index after the part's last step."""
        return self.first + self.steps

    def step_at(self, sigma: float) -> tuple[int, bool]:
        """The step of this part in which a sampler is that evaluates the model at `sigma`, and whether it is at the
        step's beginning: samplers of higher order also evaluate between two sigmas, or at the end of a step."""
        index = self.first
        for i in range(self.first, self.stop):
            if self.whole[i] < sigma and not isclose(self.whole[i], sigma, rel_tol=CLOSE / 10):
                break
            index = i
        return index, isclose(self.whole[index], sigma, rel_tol=CLOSE / 10)


@dataclass(frozen=True)
class WholeRun:
    """What the user said of the whole run: how many steps it has, its sigmas, or nothing."""

    steps: int = 0
    sigmas: tuple[float, ...] = ()

    def place(self, sigmas: Sequence[float], shift: float) -> Part:
        """Where the steps with `sigmas` (falling, one more than steps) are in the run.

        Estimated from the noise that they cover where nothing was said; the sigmas of other parts are then those of
        equal steps under `shift`. Raises OptionError where these do not fit together.
        """
        count = len(sigmas) - 1
        if count < 1 or any(after >= before for before, after in pairwise(sigmas)):
            raise OptionError(f"step caching needs sigmas that fall from step to step, not {_words(sigmas)}")
        if self.sigmas:
            return _find_in(sigmas, self.sigmas)
        found = find_part(sigmas, shift)
        total = self.steps or found.total
        if count > total:
            raise OptionError(f"steps {total} given for the whole run, but this sampler runs {count}; 0 estimates it")
        first = total - count if sigmas[-1] == 0 else min(found.first * total // found.total, total - count)
        begin, end = (unshifted(min(1.0, sigma), shift) for sigma in (sigmas[0], sigmas[-1]))
        rest = total - first - count
        before = [shifted(begin + (1 - begin) * (1 - i / first), shift) for i in range(first)]
        after = [shifted(end * (1 - i / rest), shift) for i in range(1, rest + 1)]
        return Part(first, count, total, (*before, *sigmas, *after))


def _find_in(sigmas: Sequence[float], whole: Sequence[float]) -> Part:
    count = len(sigmas) - 1
    for first in range(len(whole) - count):
        # The target of the last step may be 0 where the schedule goes on: samplers can be told to remove all noise.
        if all(isclose(a, b, rel_tol=CLOSE) for a, b in zip(sigmas[:-1], whole[first:], strict=False)):
            rest = whole[first + count + 1 :] if sigmas[-1] else ()
            return Part(first, count, first + count + len(rest), (*whole[:first], *sigmas, *rest))
    raise OptionError(
        f"the sampler's sigmas {_words(sigmas)} are no part of the whole schedule {_words(whole)}: connect the SIGMAS "
        "that the samplers' steps are made of, or none"
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
        starts, ends = part.first == 0, part.stop == part.total
        split = at_boundary if starts == ends else part.stop if starts else part.first
        if starts == ends and not starts:  # in the middle
            split = max(split, part.stop) if sigmas[part.first] >= boundary else min(split, part.first)
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
            if not part.first <= step.index < part.stop:
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


def check_native(options: SkipOptions) -> None:
    """Raises OptionError for what only this engine's own loop can do."""
    if options.guidance is not None:
        raise OptionError(
            "the guidance schedule belongs to the WanCore sampler: with another sampler, disconnect WanCore Guidance "
            "Schedule, or choose a speed preset without one, and end guidance with the sampler's own nodes"
        )
    if options.magcache is not None and options.magcache.rule != "joint":
        raise OptionError(
            "the rule 'published' counts forwards of the WanCore sampler: choose 'joint' for another sampler"
        )


def joined(plans: Sequence[Plan]) -> Plan:
    """The plans of samplers that follow each other as one plan, its steps counted from 0. Two are those of the high-
    and the low-noise expert."""
    steps = [step for plan in plans for step in plan.steps]
    if len(plans) == 2:
        count = len(plans[0].steps)
        steps = [replace(step, expert="high" if i < count else "low") for i, step in enumerate(steps)]
    split = next((i for i, step in enumerate(steps) if step.expert != steps[0].expert), 0)
    return replace(
        plans[0],
        boundary=between([step.sigma for step in steps], split) if split else 0.0,
        steps=tuple(replace(step, index=i) for i, step in enumerate(steps)),
        unskipped=sum(len(step.branches) * step.runs for step in steps),
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
        adaptive=next((plan.adaptive for plan in plans if plan.adaptive is not None), None),
        sparse=next((plan.sparse for plan in plans if plan.sparse is not None), None),
        stages=next((plan.stages for plan in plans if plan.stages), ()),
        keeps=(),
    )

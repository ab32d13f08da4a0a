"""The plan of a run of which a sampler walks a part.

A sampler tells the sigmas of its own part. The policies of step caching count steps of the whole run: `place` finds the
part in it, `plan_part` makes the plan of the whole run, as the plan preview shows it, and `cut` the plan of
the part, in which no step uses what was computed outside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isclose
from pathlib import Path

from wan_core.config import OptionError, SkipOptions
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.task import Task
from wan_core.sampling.plan import Plan, without_lost_sources
from wan_core.sampling.schedules import SchedulePart, find_part, shifted, unshifted
from wan_core.sampling.steps import Branch, Expert, Step

STATIC_WINDOWS = ("standard_static", "batched")  # schedules of context windows that are the same in every step
CLOSE = 1e-4  # relative; sigmas travel as float32 and pass through samplers' own arithmetic


@dataclass(frozen=True)
class NativeModel:
    """A model of ComfyUI as it would be sampled, with the patches that change its noise schedule.

    variant: the name of its class. task: None for a variant of which the engine has none. path: its file, where ComfyUI
    says it. note: what decided the task, where the tensors do not.
    """

    variant: str
    config: DiTConfig
    task: Task | None
    path: Path | None
    shift: float
    note: str = ""

    @property
    def name(self) -> str:
        return self.variant if self.task is None else self.task.name

    @property
    def boundary(self) -> float:
        """The boundary of two experts; 0 where one transformer runs every step."""
        return 0.0 if self.task is None else self.task.boundary


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
        # Samplers that take the logarithm of the signal-to-noise ratio begin just below 1, where it is infinite.
        near = 2 * CLOSE if self.whole[index] == 1 else CLOSE / 10
        return index, isclose(self.whole[index], sigma, rel_tol=near)


def place(sigmas: Sequence[float], shift: float, steps: int = 0) -> Part:
    """Where the steps with `sigmas` (one more than steps; they must fall, see `falls`) are in their whole run.

    steps: of the whole run; 0 estimates it from the noise that these cover. The sigmas of other parts are those of
    equal steps under `shift`. Raises OptionError where these do not fit together.
    """
    count = len(sigmas) - 1
    if not falls(sigmas):
        raise OptionError(f"step caching needs sigmas that fall from step to step, not {_words(sigmas)}")
    part = find_part(sigmas, shift)
    total = steps or part.total
    if count > total:
        raise OptionError(f"steps {total} given for the whole run, but this sampler runs {count}; 0 estimates it")
    first = total - count if sigmas[-1] == 0 else min(part.first * total // part.total, total - count)
    begin, end = (unshifted(min(1.0, sigma), shift) for sigma in (sigmas[0], sigmas[-1]))
    remaining = total - first - count
    before = [shifted(begin + (1 - begin) * (1 - i / first), shift) for i in range(first)]
    after = [shifted(end * (1 - i / remaining), shift) for i in range(1, remaining + 1)]
    return Part(first, count, total, (*before, *sigmas, *after))


def falls(sigmas: Sequence[float]) -> bool:
    """Whether there is a step, and every one removes noise: a plan is of such steps. Inversion adds noise, and a
    schedule that is split may have a part without a step."""
    return len(sigmas) > 1 and all(after < before for before, after in pairwise(sigmas))


def rising_words(sigmas: Sequence[float]) -> str:
    """Why no step is skipped of a sampler whose `sigmas` do not fall."""
    if len(sigmas) < 2:
        return "the sampler has no step"
    return f"the step cache is off: sigmas do not fall from step to step ({_words(sigmas)}), as where noise is added"


def _words(sigmas: Sequence[float]) -> str:
    shown = [f"{sigma:.4g}" for sigma in sigmas]
    return ", ".join(shown if len(shown) < 6 else [*shown[:3], "...", *shown[-2:]])


def plan_part(
    part: Part,
    *,
    name: str,
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
    return Plan(name=name, solver=solver, shift=shift, boundary=boundary, steps=steps)


def between(sigmas: Sequence[float], split: int) -> float:
    """The boundary with which the high-noise expert runs the steps before `split`."""
    return round((sigmas[split - 1] + sigmas[split]) / 2, 6)


def cut(plan: Plan, part: Part) -> Plan:
    """The steps of `part` alone: a skipped branch whose residuals would come from outside it is computed, and a
    forecast uses as many as there are."""
    steps = without_lost_sources(tuple(step for step in plan.steps if part.first <= step.index < part.stop))
    return replace(plan, steps=steps, unskipped=sum(step.unskipped for step in steps))


def without_moving_windows(plan: Plan, schedule: str | None) -> Plan:
    """`plan` without skipped steps where context windows move from step to step: a residual belongs to its window.
    schedule: the name of that of ComfyUI's context windows; None: there are none."""
    if schedule is None or schedule in STATIC_WINDOWS or not any(step.skipped for step in plan.steps):
        return plan
    note = (
        f"off: context windows of the schedule {schedule} move from step to step; {' and '.join(STATIC_WINDOWS)} stay"
    )
    steps = tuple(replace(step, action="compute", skipped=()) for step in plan.steps)
    return replace(plan, steps=steps, notes=(*plan.notes, note))


def check_native(options: SkipOptions) -> None:
    """Raises OptionError for what only this engine's own loop can do."""
    if options.magcache is not None:
        raise OptionError("MagCache counts forwards of the WanCore sampler: take taylorseer for another sampler")


def joined(plans: Sequence[Plan]) -> Plan:
    """The plans of samplers in a row as one, its steps counted from 0. Two are those of both experts."""
    steps = [step for plan in plans for step in plan.steps]
    if len(plans) == 2:
        count = len(plans[0].steps)
        steps = [replace(step, expert="high" if i < count else "low") for i, step in enumerate(steps)]
    split = next((i for i, step in enumerate(steps) if step.expert != steps[0].expert), 0)
    return replace(
        plans[0],
        boundary=between([step.sigma for step in steps], split) if split else 0.0,
        steps=tuple(replace(step, index=i) for i, step in enumerate(steps)),
        unskipped=sum(step.unskipped for step in steps),
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
        warnings=tuple(dict.fromkeys(warning for plan in plans for warning in plan.warnings)),
        sparse=next((plan.sparse for plan in plans if plan.sparse is not None), None),
    )

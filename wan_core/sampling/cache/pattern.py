"""A step cache whose computed steps are written out: a pattern of marks for each expert, 1 computed, 0 skipped.

A pattern belongs to the trajectory, not to a number of steps. Mark j of M stands for the share j / M of an expert's
phase, so 20 steps compute at the same noise as 40, as far as they have a step there. `python -m wan_core search` finds
patterns; the other policies are rules that make one.
"""

from __future__ import annotations

from collections.abc import Sequence

from wan_core.config import OptionError, PatternOptions
from wan_core.sampling.cache.magcache import mark
from wan_core.sampling.plan import Branch, Plan


def skip_pattern(plan: Plan, options: PatternOptions) -> Plan:
    """`plan` with the steps marked that the pattern skips. The video's last step is computed."""
    computed = pattern_steps(plan, options)
    skipped: list[tuple[Branch, ...]] = [
        () if step.index in computed or step.finishes else step.branches for step in plan.steps
    ]
    run: set[Branch] = set()
    for phase in plan.phases:  # a branch that its first computed steps do not have is computed where it first appears
        run.clear()
        for step in phase:
            if not set(skipped[step.index]) <= run:
                skipped[step.index] = ()
            run |= set(step.branches) - set(skipped[step.index])
    return mark(plan, skipped, options.order)


def pattern_steps(plan: Plan, options: PatternOptions) -> set[int]:
    """The indices of the steps that the pattern computes."""
    if not plan.boundary:  # one transformer runs every step
        return _marked(options.high + options.low, [step.index for step in plan.steps])
    marks = {"high": options.high, "low": options.low}
    found: set[int] = set()
    for phase in plan.phases:
        found |= _marked(marks[phase[0].expert], [step.index for step in phase])
    return found


def _marked(marks: str, steps: Sequence[int]) -> set[int]:
    return {steps[j * len(steps) // len(marks)] for j, mark in enumerate(marks) if mark == "1"}


def parse_pattern(text: str) -> PatternOptions:
    """`HIGH/LOW` or `HIGH/LOW/ORDER`: 110101/1101/1.5. Raises OptionError."""
    parts = text.split("/")
    try:
        if not 2 <= len(parts) <= 3:
            raise ValueError(text)
        return PatternOptions(high=parts[0], low=parts[1], **({"order": number(parts[2])} if len(parts) == 3 else {}))
    except ValueError as fault:
        if isinstance(fault, OptionError):
            raise
        raise OptionError(
            f"step pattern {text!r} given; write marks of both experts and an order: 1101/101/1.5"
        ) from None


def number(text: str) -> float:
    """2 as an int, 1.5 as a float: what is printed is what was written. Raises ValueError."""
    return int(text) if text.isdecimal() else float(text)


def pattern_words(options: PatternOptions) -> str:
    """In the form that `parse_pattern` reads."""
    return f"{options.high}/{options.low}/{options.order:g}"

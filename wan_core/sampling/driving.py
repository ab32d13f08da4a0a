"""The driving video in a plan (Animate-2): which steps read it, and where a forward over it runs.

Keys and values of the driving video do not depend on the step: a forward over it makes them before the first step that
reads them, and again where the text changes, or where steps in between do not read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wan_core.config import OptionError
from wan_core.models.wan.families import family_of
from wan_core.models.wan.tasks import find_task
from wan_core.sampling.cutting import without_lost_sources
from wan_core.sampling.plan import Plan, Step


def with_passes(plan: Plan, own: bool = True) -> Plan:
    """`plan` with the forwards over the driving video, for a family whose driving video takes some. own: it has a text
    and a picture of its own, so that one forward is for both branches."""
    if family_of(find_task(plan.task)).driving is None:
        return plan
    steps: list[Step] = []
    for phase in plan.phases:
        both = any("uncond" in step.branches or step.nag for step in phase)
        before: Step | None = None
        for step in phase:
            begins = before is None or (before.texts, before.undriven) != (step.texts, step.undriven)
            passes = 0 if step.undriven or not begins else 1 if own or not both else 2
            steps.append(replace(step, passes=passes))
            before = step
    more = sum(after.passes - before.passes for after, before in zip(steps, plan.steps, strict=True))
    unskipped = None if plan.unskipped is None else plan.unskipped + more
    return replace(plan, steps=tuple(steps), unskipped=unskipped)


def drive_by_text(plan: Plan, positive: Sequence[bool], negative: Sequence[bool], key: str) -> Plan:
    """`plan` in which steps read the driving video or not, as the text of each says. positive, negative: of each text,
    whether it comes with one, as the value of `key`. Raises OptionError where those of a step differ."""
    steps = []
    for step in plan.steps:
        driven = positive[step.texts[0]]
        if "uncond" in step.branches and any(negative) and negative[step.texts[1]] != driven:
            raise OptionError(
                f"`positive` and `negative` carry different values of {key} for step {step.index}: connect both "
                "outputs of the node that makes them"
            )
        steps.append(replace(step, undriven=not driven))
    count = sum(not step.undriven for step in steps)
    if all(positive) or not any(positive):
        return replace(plan, steps=tuple(steps))
    note = f"driving video: read in {count} of {len(steps)} steps"
    return replace(plan, steps=without_lost_sources(tuple(steps)), notes=(*plan.notes, note))

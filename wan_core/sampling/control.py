"""How a control video, a driving video and the negative prompt count in each step, as numbers in the plan.

A control video (VACE, Fun) counts by a strength. The driving video of Animate-2 is read in some steps or in all: its
keys and values do not depend on the step, so a forward over it makes them before the first step that reads them, and
again where the text changes, or where steps in between do not read it. Normalized attention guidance (NAG) lets steps
without classifier-free guidance see the negative prompt too (`wan_core.models.wan.layers.nag` is what cross-attention
does in them). Steps with guidance use the negative prompt already, in a forward of its own, and stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wan_core.config import ControlOptions, NagOptions, OptionError
from wan_core.models.wan.families import family_of
from wan_core.sampling.plan import Plan, without_lost_sources
from wan_core.sampling.steps import Step, averaged
from wan_core.sampling.texts import TextRange, check_reuse, ranges_of

Scales = tuple[float, ...]


def with_control(plan: Plan, options: ControlOptions) -> Plan:
    """`plan` in which the control counts by `options.scale` from `start` to `end`, in shares of the run, and not at all
    in the other steps. Raises OptionError for a task without a strength, where no step is in between, and as
    `check_reuse`."""
    assert plan.task is not None
    if not family_of(plan.task).strength_key:
        raise OptionError(f"{plan.name} takes no strength of a control: leave --control-strength out")
    if options == ControlOptions():
        return plan
    ranges = [TextRange(0.0, options.start), TextRange(options.start, options.end), TextRange(options.end, 1.0)]
    parts = [(one, scale) for one, scale in zip(ranges, (0.0, options.scale, 0.0), strict=True) if one.start < one.end]

    def scaled(step: Step) -> Step:
        number = ranges_of(step, plan.shift, [one for one, _ in parts], "the control")[-1]
        return replace(step, control=(parts[number][1],))

    changed = replace(plan, steps=tuple(map(scaled, plan.steps)))
    used = sum(any(step.control or ()) for step in changed.steps)
    if options.scale and not used:
        raise OptionError(
            f"control from {options.start:g} to {options.end:g} of the run given, in which none of the "
            f"{plan.count} steps is: use a longer range, or more steps"
        )
    check_reuse(changed)
    return replace(changed, notes=(*plan.notes, f"control: {options.words()}, {used} of {len(plan.steps)} steps"))


def scale_by_text(plan: Plan, positive: Sequence[Scales], negative: Sequence[Scales]) -> Plan:
    """`plan` in which control videos count as the text of each step says. Raises OptionError where the two prompts of a
    step say different things."""

    def scaled(step: Step) -> Step:
        scales = {positive[step.texts[0]]} | ({negative[step.texts[1]]} if "uncond" in step.branches else set())
        if len(scales) > 1:
            raise OptionError(
                f"step {step.index}: strengths of control videos change during the run, and those of `positive` and "
                "`negative` differ: give both the same"
            )
        return replace(step, control=scales.pop())

    return replace(plan, steps=tuple(averaged([scaled(one) for one in step.conditions]) for step in plan.steps))


def with_passes(plan: Plan, own: bool = True) -> Plan:
    """`plan` with the forwards over the driving video, for a family whose driving video takes some. own: it has a text
    and a picture of its own, so that one forward is for both branches."""
    if plan.task is None or not family_of(plan.task).driving_keys:
        return plan
    steps: list[Step] = []
    for phase in plan.phases:
        both = any("uncond" in step.branches or step.nag for step in phase)
        before: Step | None = None
        for step in phase:
            passes = 0
            for one in step.conditions:
                begins = before is None or (before.texts, before.undriven) != (one.texts, one.undriven)
                passes += 0 if one.undriven or not begins else 1 if own or not both else 2
                before = one
            steps.append(replace(step, passes=passes))
    more = sum(after.passes - before.passes for after, before in zip(steps, plan.steps, strict=True))
    unskipped = None if plan.unskipped is None else plan.unskipped + more
    return replace(plan, steps=tuple(steps), unskipped=unskipped)


def drive_by_text(plan: Plan, positive: Sequence[bool], negative: Sequence[bool], key: str) -> Plan:
    """`plan` in which steps read the driving video or not, as the text of each says. positive, negative: of each text,
    whether it comes with one, as the value of `key`. Raises OptionError where those of a step differ."""

    def driven_by(step: Step) -> Step:
        driven = positive[step.texts[0]]
        if "uncond" in step.branches and any(negative) and negative[step.texts[1]] != driven:
            raise OptionError(
                f"`positive` and `negative` carry different values of {key} for step {step.index}: connect both "
                "outputs of the node that makes them"
            )
        return replace(step, undriven=not driven)

    steps = tuple(averaged([driven_by(one) for one in step.conditions]) for step in plan.steps)
    count = sum(any(not one.undriven for one in step.conditions) for step in steps)
    if all(positive) or not any(positive):
        return replace(plan, steps=steps)
    note = f"driving video: read in {count} of {len(steps)} steps"
    return replace(plan, steps=without_lost_sources(steps), notes=(*plan.notes, note))


def with_nag(plan: Plan, options: NagOptions) -> Plan:
    """`plan` with normalized attention guidance in every step of one branch. Raises OptionError where there is none."""
    steps = tuple(replace(step, nag=step.branches == ("cond",)) for step in plan.steps)
    if not any(step.nag for step in steps):
        raise OptionError(
            "every step has guidance, which uses the negative prompt already: set guidance to 1 (as with distilled "
            "weights), or leave out normalized attention guidance (NAG)"
        )
    count = f"{sum(step.nag for step in steps)} of {len(steps)} steps"
    note = f"normalized attention guidance: {options.words()}, in {count}"
    return replace(plan, steps=steps, nag=options, notes=(*plan.notes, note))

"""How much a control video counts in each step (VACE), as numbers in the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wan_core.config import ControlOptions, OptionError
from wan_core.models.wan.families import family_of
from wan_core.models.wan.tasks import find_task
from wan_core.sampling.plan import Plan, Step
from wan_core.sampling.texts import TextRange, range_of

Scales = tuple[float, ...]


def with_control(plan: Plan, options: ControlOptions) -> Plan:
    """`plan` in which the control counts by `options.scale` from `start` to `end`, in shares of the run, and not at all
    in the other steps. Raises OptionError for a task without a strength, where no step is in between, and as
    `check_reuse`."""
    if not family_of(find_task(plan.task)).strength_key:
        raise OptionError(f"{plan.task} takes no strength of a control: leave --control-scale, -start and -end out")
    if options == ControlOptions():
        return plan
    ranges = [TextRange(0.0, options.start), TextRange(options.start, options.end), TextRange(options.end, 1.0)]
    parts = [(one, scale) for one, scale in zip(ranges, (0.0, options.scale, 0.0), strict=True) if one.start < one.end]

    def scaled(step: Step) -> Step:
        number = range_of(step, plan.shift, [one for one, _ in parts], "the control", "range")
        return replace(step, control=(parts[number][1],))

    changed = replace(plan, steps=tuple(map(scaled, plan.steps)))
    used = sum(any(step.control or ()) for step in changed.steps)
    if options.scale and not used:
        raise OptionError(
            f"control from {options.start:g} to {options.end:g} of the run given, in which none of the "
            f"{plan.count} steps is: use a longer range, or more steps"
        )
    check_reuse(changed)
    return replace(
        changed, notes=(*plan.notes, f"control: {control_words(options)}, {used} of {len(plan.steps)} steps")
    )


def scale_by_text(plan: Plan, positive: Sequence[Scales], negative: Sequence[Scales]) -> Plan:
    """`plan` in which control videos count as the text of each step says. Raises OptionError where the two prompts of a
    step say different things, and as `check_reuse`."""
    steps = []
    for step in plan.steps:
        scales = {positive[step.texts[0]]} | ({negative[step.texts[1]]} if "uncond" in step.branches else set())
        if len(scales) > 1:
            raise OptionError(
                f"step {step.index}: strengths of control videos change during the run, and those of `positive` and "
                "`negative` differ: give both the same"
            )
        steps.append(replace(step, control=scales.pop()))
    changed = replace(plan, steps=tuple(steps))
    check_reuse(changed)
    return changed


def check_reuse(plan: Plan) -> None:
    """Raise OptionError where forwards are skipped while the control changes: what is kept of one belongs to it."""
    for phase in plan.phases:
        changes = len({step.control for step in phase}) > 1
        if changes and any(step.skipped or step.delta for step in phase):
            raise OptionError(
                f"the strength of the control changes during the steps of the {phase[0].expert}-noise expert, and some "
                "of them reuse what was computed with another: leave out step caching and the guidance schedule, or "
                "use one strength for all steps"
            )


def control_words(options: ControlOptions) -> str:
    """`0.8 from 0 to 0.5 of the run`."""
    return f"{options.scale:g} from {options.start:g} to {options.end:g} of the run"

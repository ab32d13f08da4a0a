"""The part of a plan that its window asks for, as a plan of its own."""

from __future__ import annotations

from dataclasses import replace

from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Branch, Step, step_numbers


def cut_plan(plan: Plan) -> Plan:
    """The part of `plan` that its window asks for, with steps numbered from 0. Forwards that would reuse what a step
    before the window computed are computed, and so is a last step that removes the noise that is left."""
    window = plan.window
    if window is None:
        return plan
    numbers = step_numbers(plan.steps)
    assert window.end is not None
    inside = [step for step, number in zip(plan.steps, numbers, strict=True) if window.start <= number < window.end]
    before = tuple(step.sigma for step in plan.steps[: inside[0].index])
    if window.end <= numbers[-1] and not window.leftover:
        inside = [step for step in inside if not (step.correction and step is inside[-1])]
        inside[-1] = replace(inside[-1], sigma_next=0.0, action="compute", skipped=(), order=0)
    steps = tuple(replace(step, index=index) for index, step in enumerate(inside))
    from_latents = plan.from_latents or window.start > 0
    return replace(plan, window=None, steps=without_lost_sources(steps), before=before, from_latents=from_latents)


def without_lost_sources(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """`steps`, in which forwards run whose residual would come from none of them."""
    mended: list[Step] = []
    computed: dict[Branch, int] = {}
    for step in steps:
        if mended and (mended[-1].expert, mended[-1].kind) != (step.expert, step.kind):
            computed = {}
        skipped: tuple[Branch, ...] = tuple(branch for branch in step.skipped if computed.get(branch))
        if skipped != step.skipped or step.order:
            order = min(step.order, *(computed[branch] - 1 for branch in skipped)) if skipped else 0
            action = "compute" if not skipped else "forecast" if order else step.action
            action = "reuse" if action == "forecast" and not order else action
            step = replace(step, skipped=skipped, order=order, action=action)
        for branch in step.branches:
            if branch not in skipped:
                computed[branch] = computed.get(branch, 0) + 1
        mended.append(step)
    return tuple(mended)

"""A part of a schedule: video-to-video by strength, and runs that begin or end in the middle of the steps.

Decisions about skipped forwards need the whole schedule, so a plan is made whole with the `Window` that was asked for,
and `cut_plan` is applied last. Legend as in `wan_core.sampling.plan`: a solver step is one or two forwards (Heun).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wan_core.config.checks import OptionError, check_range

if TYPE_CHECKING:
    from wan_core.sampling.plan import Branch, Plan, Step


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which solver steps of a schedule run. Raises OptionError.

    denoise: strength of video-to-video. Below 1 the schedule has steps / denoise steps, of which the last `steps` run,
    as in ComfyUI's KSampler. start, end: of the steps that are left, the first that runs and the one after the last;
    an end beyond the last step is the last step. leftover: a run that ends early leaves its noise in the latents;
    otherwise its last step removes all of it.
    """

    denoise: float = 1.0
    start: int = 0
    end: int | None = None
    leftover: bool = False

    def __post_init__(self) -> None:
        check_range("denoise", self.denoise, 1e-4, 1, "1 starts from noise alone, 0.5 keeps half of a video's schedule")
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            end = "the last step" if self.end is None else f"step {self.end}"
            raise OptionError(
                f"start step {self.start} and end {end} given, between which no step is: the start is 0 or more, the "
                "end larger than the start"
            )

    def within(self, steps: int) -> tuple[int, Window]:
        """How many solver steps the schedule has of which `steps` are to run, and the window in it, whose strength
        is 1. Raises OptionError where no step is left."""
        whole = int(steps / self.denoise)
        if self.start >= steps:
            raise OptionError(f"start step {self.start} given, and there are {steps} steps: start earlier")
        first = whole - steps
        end = whole if self.end is None else min(whole, first + self.end)
        return whole, Window(start=first + self.start, end=end, leftover=self.leftover)


def cut_plan(plan: Plan) -> Plan:
    """The part of `plan` that its window asks for, with steps numbered from 0. Forwards that would reuse what a step
    before the window computed are computed."""
    window = plan.window
    if window is None:
        return plan
    numbers = step_numbers(plan.steps)
    assert window.end is not None
    kept = [step for step, number in zip(plan.steps, numbers, strict=True) if window.start <= number < window.end]
    before = tuple(step.sigma for step in plan.steps[: kept[0].index])
    if window.end <= numbers[-1] and not window.leftover:
        kept = [step for step in kept if not (step.correction and step is kept[-1])]
        kept[-1] = replace(kept[-1], sigma_next=0.0)
    steps = tuple(replace(step, index=index) for index, step in enumerate(kept))
    from_latents = plan.from_latents or window.start > 0
    return replace(plan, window=None, steps=without_lost_sources(steps), before=before, from_latents=from_latents)


def step_numbers(steps: tuple[Step, ...]) -> list[int]:
    """Of each forward, the number of its solver step."""
    numbers: list[int] = []
    for step in steps:
        numbers.append((numbers[-1] if numbers else -1) + (not step.correction))
    return numbers


def without_lost_sources(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """`steps`, in which forwards run whose residual or difference of the branches would come from none of them."""
    found: list[Step] = []
    computed: dict[Branch, int] = {}
    both = False
    for step in steps:
        if found and found[-1].expert != step.expert:
            computed, both = {}, False
        if step.delta and not both:
            step = replace(step, delta=False, branches=("cond", "uncond"))
        skipped: tuple[Branch, ...] = tuple(branch for branch in step.skipped if computed.get(branch))
        if step.action == "adaptive" and skipped != step.branches:
            skipped = ()
        if skipped != step.skipped or step.order:
            order = min(step.order, *(computed[branch] - 1 for branch in skipped)) if skipped else 0
            action = "compute" if not skipped else "forecast" if order else step.action
            action = "reuse" if action == "forecast" and not order else action
            step = replace(step, skipped=skipped, order=order, action=action)
        for branch in step.branches:
            if branch in skipped and step.action != "adaptive":
                continue
            computed[branch] = computed.get(branch, 0) + 1
        both = both or ("uncond" in step.branches and not step.delta)
        found.append(step)
    return tuple(found)

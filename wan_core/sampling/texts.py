"""Texts that change during a run: which step attends to which, as numbers in the plan.

A text may be for a range of the run, in shares from 0 (the start, all noise) to 1 (the end). A share is a sigma as in
ComfyUI (`ModelSamplingDiscreteFlow.percent_to_sigma`): what the shift of the MODEL makes of 1 - share, whatever sigmas
the run has. A text is used where its range, rounded to float32 as sigmas are, has the sigma at which a step begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from wan_core.config import OptionError
from wan_core.sampling.plan import Plan, Step
from wan_core.sampling.schedules import float32

NEAR = 1e-4  # ranges that end and begin so near to each other follow one another without a gap


class TextRange(NamedTuple):
    """Where in a run a text is used, in shares of it."""

    start: float = 0.0
    end: float = 1.0

    @classmethod
    def of(cls, extras: Mapping[str, Any]) -> TextRange:
        """The range of steps that is stored in an entry of ComfyUI's CONDITIONING."""
        end = extras.get("end_percent")
        return cls(extras.get("start_percent") or 0.0, 1.0 if end is None else end)

    def percents(self) -> dict[str, float]:
        """The inverse of `of`."""
        return {"start_percent": self.start, "end_percent": self.end}


def shared_range(one: TextRange, other: TextRange) -> TextRange | None:
    """What both ranges have; None for nothing."""
    start, end = max(one.start, other.start), min(one.end, other.end)
    return TextRange(start, end) if start < end else None


WHOLE = TextRange()


def sigma_at(share: float, shift: float) -> float:
    """The sigma at a share of the run: 1 at its start, 0 at its end."""
    remaining = min(1.0, max(0.0, 1.0 - share))
    return shift * remaining / (1 + (shift - 1) * remaining)


def assign_ranges(
    plan: Plan, positive: Sequence[TextRange], negative: Sequence[TextRange], shift: float | None = None
) -> Plan:
    """`plan` in which every step says which of the prompt's and of the negative prompt's ranges it is in.

    shift: of the MODEL, which makes sigmas of shares; None: that of the plan. At a step on the border of two ranges the
    later one counts. Raises OptionError where a step has no text or several.
    """
    steps: list[Step] = []
    shift = plan.shift if shift is None else shift
    for phase in plan.phases:
        guided = any("uncond" in step.branches or step.nag for step in phase)
        for step in phase:
            uncond = range_of(step, shift, negative, "negative") if guided else 0
            steps.append(replace(step, texts=(range_of(step, shift, positive, "positive"), uncond)))
    return replace(plan, steps=tuple(steps))


def check_texts(plan: Plan) -> Plan:
    """`plan` itself. Raises OptionError where forwards are skipped while a text changes: what is kept of a forward
    belongs to its text."""
    for phase in plan.phases:
        changes = len({step.texts for step in phase}) > 1
        if changes and any(step.skipped or step.delta for step in phase):
            raise OptionError(
                f"the text changes during the steps of the {phase[0].expert}-noise expert, and some of them reuse what "
                "was computed for the text before: leave out step caching and the guidance schedule, or use one text"
            )
    return plan


def range_of(step: Step, shift: float, ranges: Sequence[TextRange], name: str, kind: str = "text") -> int:
    """Which of `ranges` a step is in. kind: what they are of. Raises OptionError unless it is one."""

    def at(share: float) -> float:
        return float32(sigma_at(share, shift))

    def inside_of(slack: float) -> list[int]:
        return [n for n, (start, end) in enumerate(ranges) if at(end + slack) <= step.sigma <= at(start - slack)]

    inside = inside_of(0.0) or inside_of(NEAR)
    if len(inside) > 1:
        inside = [n for n in inside if step.sigma > at(ranges[n].end - NEAR)]
    if len(inside) != 1:
        count = f"{len(inside)} {kind}s" if inside else f"no {kind}"
        spans = ", ".join(f"{start:g} to {end:g}" for start, end in ranges)
        raise OptionError(
            f"`{name}` has {count} for step {step.index} (sigma {step.sigma:.4f}); its ranges are {spans}. A step "
            "takes one text, and texts are not averaged: give ranges that follow one another from 0 to 1, or one text"
        )
    return inside[0]

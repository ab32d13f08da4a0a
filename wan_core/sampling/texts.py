"""Texts that change during a run, and prompts over time, as numbers in the plan: which step attends to which text, and
which frame follows which prompt. Imports no torch.

A text may be for a range of the run, in shares from 0 (the start, all noise) to 1 (the end). A share is a sigma as in
ComfyUI (`ModelSamplingDiscreteFlow.percent_to_sigma`): what the shift of the MODEL makes of 1 - share, whatever sigmas
the run has. A text is used where its range, rounded to float32 as sigmas are, has the sigma at which a step begins. Of
several texts the velocities are averaged, as in ComfyUI's `calc_cond_batch`.

The prompts of a video are one text for the encoder: the prompt of the whole video, then those of ranges of frames. In
cross-attention a penalty is taken off the scores of the tokens of a range's prompt, by the distance of the frame to the
range: 0 inside it, and so large `TAIL` latent frames beyond it that the weight is `FAINT` of what it was. The prompt of
the whole video and the padding have none. Source: Prompt Relay, Chen et al. 2026, arXiv:2604.10030, with ranges as in
its code for Wan 2.2 (`segment_intervals`).

"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm, log
from typing import Any, NamedTuple

from wan_core.config import OptionError, PromptAt
from wan_core.models.wan.families.clips import PER_LATENT
from wan_core.sampling.plan import Plan
from wan_core.sampling.schedules import float32
from wan_core.sampling.steps import Step, averaged

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

    shift: of the MODEL, which makes sigmas of shares; None: that of the plan. Raises OptionError where a step has no
    text.
    """
    steps: list[Step] = []
    shift = plan.shift if shift is None else shift
    for phase in plan.phases:
        guided = any("uncond" in step.branches or step.nag for step in phase)
        for step in phase:
            cond = ranges_of(step, shift, positive, "positive")
            uncond = ranges_of(step, shift, negative, "negative") if guided else [0]
            pairs = ((cond[n % len(cond)], uncond[n % len(uncond)]) for n in range(lcm(len(cond), len(uncond))))
            steps.append(averaged([replace(step, texts=pair) for pair in pairs]))
    return replace(plan, steps=tuple(steps))


def check_reuse(plan: Plan) -> Plan:
    """`plan` itself. Raises OptionError where forwards are skipped while a text or the control's strength changes: what
    is kept of a forward belongs to them."""
    for phase in plan.phases:
        conditions = [one for step in phase for one in step.conditions]
        seen = {
            "text": {one.texts for one in conditions},
            "strength of the control": {one.control for one in conditions},
        }
        for name, different in seen.items():
            if len(different) > 1 and any(step.skipped for step in phase):
                raise OptionError(
                    f"the {name} changes during the steps of the {phase[0].expert}-noise expert, and some of them "
                    f"reuse what was computed with another: leave out step caching, or use one {name} for all steps"
                )
    return plan


def ranges_of(step: Step, shift: float, ranges: Sequence[TextRange], name: str) -> list[int]:
    """Which of `ranges` a step is in. Raises OptionError for none."""

    def inside(slack: float) -> list[int]:
        return [n for n, (start, end) in enumerate(ranges) if at(end + slack) <= step.sigma <= at(start - slack)]

    def at(share: float) -> float:
        return float32(sigma_at(share, shift))

    numbers = inside(0.0) or inside(NEAR)[-1:]
    if not numbers:
        spans = ", ".join(f"{start:g} to {end:g}" for start, end in ranges)
        raise OptionError(
            f"`{name}` has no text for step {step.index} (sigma {step.sigma:.4f}); its ranges are {spans}: give ranges "
            "that cover the run from 0 to 1"
        )
    return numbers


TAIL = 2.0
FAINT = 1e-3


@dataclass(frozen=True)
class TimedText:
    """What the encoder reads as one text. prompts: of ranges of frames, which begin at the latent frames `starts`."""

    whole: str
    prompts: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        return self.prefixes[-1] if self.prompts else self.whole

    @property
    def prefixes(self) -> list[str]:
        """The text before each of `prompts`, and all of it: how many tokens they have says which tokens are whose."""
        parts = [" ".join(one.split()) for one in (self.whole, *self.prompts)]
        return [" ".join(part for part in parts[: count + 1] if part) for count in range(len(parts))]

    @property
    def changes(self) -> bool:
        """Whether frames differ in what they attend to."""
        return len(self.prompts) > 1

    def penalties(self, frames: int) -> list[list[float]]:
        """What is taken off the scores of each of `prompts`, for every latent frame of a video of so many."""
        sigma = TAIL / (-2 * log(FAINT)) ** 0.5
        ends = (*self.starts[1:], frames)

        def penalty(frame: int, start: int, end: int) -> float:
            outside = max(start - frame, frame - (end - 1), 0)
            return outside**2 / (2 * sigma**2)

        return [[penalty(frame, *one) for one in zip(self.starts, ends, strict=True)] for frame in range(frames)]


def check_cut(given: int, read: int) -> None:
    """Raise OptionError where the last of several prompts would be cut. given: tokens of all of them."""
    if given > read:
        raise OptionError(
            f"the prompts together have {given} tokens, and {read} are read: the last ones would be cut. Shorten them, "
            "or leave some out"
        )


def first_latent(frame: int) -> int:
    """The latent frame that holds a frame of the video: the first from which on a prompt counts."""
    return -(-frame // PER_LATENT)


def text_of_frames(whole: str, prompts: Sequence[PromptAt], first: int, end: int) -> TimedText:
    """The text of a clip of the frames `first` to `end` - 1: the prompts that hold in it, from its own first frame."""
    following = [one.frame for one in prompts[1:]]
    held = [
        (one.text, max(0, first_latent(one.frame - first)))
        for one, until in zip(prompts, [*following, end], strict=False)
        if one.frame < end and until > first
    ]
    return TimedText(whole, tuple(text for text, _ in held), tuple(start for _, start in held))

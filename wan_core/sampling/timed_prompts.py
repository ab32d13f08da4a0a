"""Prompts over time as numbers: which prompts a text is made of, and how much each frame is kept from attending to it.

The prompts of a video are one text for the encoder: the prompt of the whole video, then those of ranges of frames. In
cross-attention a penalty is taken off the scores of the tokens of a range's prompt, by the distance of the frame to the
range: 0 inside it, and so large `TAIL` latent frames beyond it that the weight is `FAINT` of what it was. The prompt of
the whole video and the padding have none. Source: Prompt Relay, Chen et al. 2026, arXiv:2604.10030, with ranges as in
its code for Wan 2.2 (`segment_intervals`). Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from wan_core.config import OptionError, PromptAt
from wan_core.models.wan.families.clips import PER_LATENT
from wan_core.sampling.plan import Plan, PromptTimes

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
        """All of it."""
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


def with_prompts(plan: Plan, starts: Sequence[int], frames: int) -> Plan:
    """`plan`, whose windows are known, for prompts that begin at these frames of a video of so many. Windows that take
    one text each have the prompt that holds in their middle."""
    plan = replace(plan, prompts=PromptTimes(tuple(starts), frames))
    options = plan.context_windows
    if options is None or not options.split:
        return plan
    latents = [first_latent(frame) for frame in starts]

    def text(window: Sequence[int]) -> tuple[int, int]:
        return bisect_right(latents, (window[0] + window[-1]) / 2) - 1, 0

    return of_windows(plan, [[text(window) for window in step.windows] for step in plan.steps])


def texts_in_windows(plan: Plan, frames: int, positive: Sequence[int], negative: Sequence[int]) -> Plan:
    """`plan` in which each window takes one of these texts of the prompt and of the negative prompt, which share the
    latent frames evenly: the rule of ComfyUI's `split_conds_to_windows`."""

    def region(window: Sequence[int], texts: Sequence[int]) -> int:
        return texts[min(int((min(window) + max(window)) / (2 * frames) * len(texts)), len(texts) - 1)]

    windows = [[(region(one, positive), region(one, negative)) for one in step.windows] for step in plan.steps]
    return of_windows(plan, windows)


def of_windows(plan: Plan, texts: Sequence[Sequence[tuple[int, int]]]) -> Plan:
    """`plan` with the text of the prompt and of the negative prompt of each window of each step."""
    steps = (replace(step, window_texts=tuple(own)) for step, own in zip(plan.steps, texts, strict=True))
    return replace(plan, steps=tuple(steps))

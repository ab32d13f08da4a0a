"""The place of a sampler's steps in the whole schedule.

A graph with two experts runs two samplers, each with a part of the sigmas; image to image starts in the middle. What
depends on the progress of the video (dense first steps, step caching) needs the whole schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulePart:
    """Steps `first` to `first + steps - 1` of a schedule of `total`."""

    first: int
    steps: int
    total: int

    def index(self, step: int) -> int:
        """The index in the whole schedule of the part's `step`; samplers with more evaluations stay at the last."""
        return self.first + min(max(step, 0), self.steps - 1)


def unshifted(sigma: float, shift: float) -> float:
    """The noise time 0..1 that `shift` turns into `sigma`: sigma = shift * t / (1 + (shift - 1) * t)."""
    return sigma / (shift + (1 - shift) * sigma)


def find_part(sigmas: Sequence[float], shift: float) -> SchedulePart:
    """Which part of a whole schedule, from noise to video, the steps between `sigmas` are.

    Exact where the whole schedule has equal steps before the shift (simple, normal, sgm_uniform, ddim_uniform), and for
    any schedule that is whole. For others it is the share of the noise time that lies before.
    """
    steps = max(1, len(sigmas) - 1)
    if len(sigmas) < 2:
        return SchedulePart(0, 1, 1)
    begin, end = unshifted(min(1.0, sigmas[0]), shift), unshifted(min(1.0, sigmas[-1]), shift)
    if begin <= end:  # noise is added: nothing of the kind that a schedule describes
        return SchedulePart(0, steps, steps)
    total = max(steps, round(steps / (begin - end)))
    return SchedulePart(min(total - steps, round((1 - begin) * total)), steps, total)

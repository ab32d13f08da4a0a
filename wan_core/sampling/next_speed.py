"""What another word of `speed` would have saved of a run, by its plan and the seconds that the run took."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from wan_core.config import SPEEDS, UserError
from wan_core.media.pictures import clock
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Expert

LEAST_SAVED = 0.02  # of a run: below, a word of `speed` is not worth a line


def next_speed(plan: Plan, speed: str, planned: Callable[[str], Plan], seconds: Mapping[Expert, float]) -> str:
    """The next word of `speed` that would save time in the run of `plan`, and what it would change, in a line; empty
    where none would. planned: the plan of the run at a word. seconds: of a forward of each expert in that run."""
    now = plan.estimate(seconds)
    if not now:
        return ""
    for word in SPEEDS[SPEEDS.index(speed) + 1 :]:
        try:
            other = planned(word)
        except UserError:  # this model or solver has no such word
            continue
        then = other.estimate(seconds)
        if then is None or now - then < max(0.1, LEAST_SAVED * now):
            continue
        skipped, read = (other.unskipped or 0) - other.forwards, [1 - s.sparsity for s in other.steps if s.sparsity]
        changes = [f"{skipped} of {other.unskipped} forwards skipped"] if skipped > 0 else []
        changes += [f"attention reads down to {100 * min(read):.0f} % of the keys"] if read else []
        return f"speed {word}: about {clock(now - then)} less; {', '.join(changes)}; fine detail changes"
    return ""

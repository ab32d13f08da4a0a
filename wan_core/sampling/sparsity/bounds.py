"""The rule of bounded sparse attention: how many blocks each layer reads next, from the errors that the run measured.
Pure functions of numbers, without torch.

A *run* is the computed steps of one expert at one size. A layer's share of the blocks is one of a few levels, from 1/16
to all (`LEVELS`; those below the floor, and those that are the same number of blocks, are left out).

1. The first computed step of a run reads everything, the second half of the blocks. The bound may change from step to
   step: the plan gives the first steps of a video a part of it (`schedule.step_bounds`).
2. From then on a layer reads the lowest level whose expected error is at most `MARGIN` times the bound: at most two
   levels lower than in the step before, as much higher as is needed.
3. The expected error at another share follows from the newest measured one: log(error) falls linearly with
   log(share / (1 - share)). The slope is `UNKNOWN` until errors at two shares are known, towards higher and towards
   lower shares. Then it is that of the newest two, within `SLOPES`: towards higher shares at most `USUAL`, towards
   lower ones at least that and `STEEPER` times as much, because curves are steeper there. Either way the error is
   rather expected too large.
4. A layer that is expected to exceed the bound at the highest level below all reads everything. It tries that level
   again every `AGAIN` computed steps if its expected error there is at most `CLOSE` times the bound.

What a step measured is used in the next computed step, never earlier or later: a seed gives the same video again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEVELS = (1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)
SECOND = 1 / 2
DOWN = 2  # levels in a step
MARGIN = 0.9
# Fitted to errors at all levels of the embedded model (medians 0.6 to 1.3, tenths 0.3 to 2.4) and of drawn q, k and v
# (0.3 to 0.7): docs/sparse.md.
UNKNOWN, USUAL, STEEPER, SLOPES = (0.6, 1.5), 0.8, 1.25, (0.3, 2.5)
AGAIN, CLOSE = 4, 1.5
SMALLEST = 1e-9  # error that is told from 0


@dataclass
class LayerState:
    """What is known of one layer. level: index of the newest choice. odds, log_error: of the newest measurement. slope:
    its own. waited: computed steps that it read everything for."""

    level: int
    odds: float | None = None
    log_error: float = 0.0
    slope: float | None = None
    waited: int = 0


class Shares:
    """Chooses the level of every layer of one run. `choose` is called once for each layer and computed step."""

    def __init__(self, bound: float, blocks: int, floor: float = 0.0) -> None:
        """blocks: of keys. floor: the lowest share; the highest level below all is always there."""
        self.bound = bound
        self.levels = usable_levels(blocks, floor)
        self.layers: dict[int, LayerState] = {}

    @property
    def dense(self) -> int:
        """The index of the level that reads everything."""
        return len(self.levels) - 1

    def choose(self, layer: int, computed: int, error: float | None = None) -> float:
        """The share for `layer` in computed step `computed`, from 0. error: that of the computed step before; None:
        nothing was measured, because the layer read everything."""
        state = self.layers.setdefault(layer, LayerState(self.dense))
        if error is not None:
            self._note(state, error)
        if computed == 0:
            state.level = self.dense
        elif state.odds is None:
            state.level = next(i for i, share in enumerate(self.levels) if share >= SECOND)
        else:
            state.level = self._next(state)
        return self.levels[state.level]

    def _note(self, state: LayerState, error: float) -> None:
        odds = log_odds(self.levels[state.level])
        log_error = math.log(max(error, SMALLEST)) if error < math.inf else math.inf
        if state.odds is not None and state.odds != odds and max(abs(log_error), abs(state.log_error)) < math.inf:
            low, high = SLOPES
            own = (state.log_error - log_error) / (odds - state.odds)
            state.slope = min(max(own, low), high)
        state.odds, state.log_error = odds, log_error

    def _next(self, state: LayerState) -> int:
        target = math.log(MARGIN * self.bound)
        fits = (i for i in range(self.dense) if self._expected(state, i) <= target)
        level = next(fits, self.dense)
        if state.level < self.dense:
            state.waited = 0
            return max(level, state.level - DOWN)
        state.waited += 1
        close = self._expected(state, self.dense - 1) <= math.log(CLOSE * self.bound)
        if not close or state.waited < AGAIN:
            return self.dense
        state.waited = 0
        return self.dense - 1

    def _expected(self, state: LayerState, level: int) -> float:
        """The logarithm of the expected error at a level."""
        assert state.odds is not None
        higher = log_odds(self.levels[level]) - state.odds
        known = state.slope
        flat, steep = UNKNOWN if known is None else (min(known, USUAL), STEEPER * max(known, USUAL))
        return state.log_error - (flat if higher > 0 else steep) * higher


def usable_levels(blocks: int, floor: float = 0.0) -> tuple[float, ...]:
    """The levels from `floor` on that are different numbers of `blocks`, the smallest share of each."""
    chosen: dict[int, float] = {}
    for share in LEVELS:
        if share >= min(floor, LEVELS[-2]):
            chosen.setdefault(blocks_read(share, blocks), share)
    chosen[blocks] = 1.0
    return tuple(chosen.values())


def blocks_read(share: float, blocks: int) -> int:
    """How many of `blocks` a share reads, rounded as in `Rule.most`."""
    return min(blocks, max(1, round(share * blocks)))


def log_odds(share: float) -> float:
    return math.log(share / (1 - share))


# ------------------------------------------------------------------------------------------------------- what was kept


@dataclass(frozen=True)
class StepErrors:
    """What one computed step of a run read and measured. shares: by layer. errors, worst: relative error of attention's
    output by layer, of all heads together and of the worst head; None where the layer read everything. read: the mean
    share."""

    step: int
    shares: tuple[float, ...]
    errors: tuple[float | None, ...]
    worst: tuple[float | None, ...]

    @property
    def read(self) -> float:
        return sum(self.shares) / len(self.shares)

    @property
    def error(self) -> float:
        """The mean over all layers; those that read everything have none."""
        return sum(error or 0.0 for error in self.errors) / len(self.errors)

    @property
    def highest(self) -> float:
        return max((error for error in self.errors if error is not None), default=0.0)

    def words(self) -> str:
        return f"{100 * self.read:.0f} % of keys, error {self.error:.2g}"

    def as_dict(self) -> dict[str, object]:
        """Rounded, for the report."""
        rounded = [[None if n is None else float(f"{n:.3g}") for n in row] for row in (self.errors, self.worst)]
        return {"step": self.step, "shares": [round(s, 4) for s in self.shares], "errors": rounded[0],
                "worst_heads": rounded[1]}  # fmt: skip


def run_words(attention: Sequence[Mapping[str, Any]], bound: float) -> str:
    """One line about the computed steps of a whole video, as the report has them: what attention read, and its error in
    the steps that did not read everything."""
    shares = [share for step in attention for share in step["shares"]]
    sparse = [step["errors"] for step in attention if any(error is not None for error in step["errors"])]
    errors = [error or 0.0 for step in sparse for error in step]
    read, error = sum(shares) / len(shares), sum(errors) / max(1, len(errors))
    return f"attention read {100 * read:.0f} % of the keys, error {error:.2g} of {bound:g}"


def head_errors(differences: Sequence[float], outputs: Sequence[float]) -> tuple[float, float]:
    """The relative error of all heads together and of the worst, from sums of squares by head."""
    together = relative_error(math.fsum(differences), math.fsum(outputs))
    return together, max(map(relative_error, differences, outputs))


def relative_error(difference: float, output: float) -> float:
    """From sums of squares. Rounding that was taken off may leave a difference below 0. Numbers that are not finite are
    an infinite error."""
    if not (math.isfinite(difference) and math.isfinite(output)):
        return math.inf
    return math.sqrt(max(difference, 0.0) / output) if output > 0 else 0.0

"""The search for settings: the most quality within so many seconds.

The arithmetic comes first. The plan of a setting says what it takes, so with sparse attention and guidance chosen, the
number of steps that may be computed follows from the seconds. What is left to measure is how to share the seconds out:
few steps that read much, or more that read less, and which steps. So a target begins with one candidate for each choice
in `AXES`, order and distribution of the computed steps, each with as many steps as fit. They are measured by successive
halving: all on a few videos, the better part on more, the best on all. Then the best is changed in one place at a time,
a computed step earlier or later, another guidance, and keeps what is better on all videos.

Nothing here runs a model: `Measure` does, and the same numbers give the same search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from random import Random
from statistics import fmean

from wan_core.config import OptionError, PatternOptions
from wan_core.config.table import slashes
from wan_core.sampling.cache.policies import parse_pattern, pattern_steps
from wan_core.sampling.plan import Plan

# What a setting may have beside its computed steps: words of `quality --setting`, "" for nothing. Another way to save
# work is another row.
AXES: dict[str, tuple[str, ...]] = {
    "sparse": (
        "", "sparse:0.5/0/0", "sparse:0.625/0/0:ramp0",
        "sparse:0.5/0/0:error", "sparse:0.625/0/0:ramp0:error", "sparse:0.75/0/0:ramp0:error", "sparse:0.75/0/0:error",
        "sparse:0.78125/0/0:error", "sparse:0.8125/0/0:ramp0:error", "sparse:0.8125/0/0:error",
        "sparse:0.875/0/0:ramp0:error", "sparse:0.875/0/0:error",
        "sparse:0.8125/0/0:error:slope", "sparse:0.84375/0/0:ramp0:error:slope", "sparse:0.84375/0/0:error:slope",
        "sparse:0.859375/0/0:error:slope", "sparse:0.875/0/0:ramp0:error:slope", "sparse:0.875/0/0:error:slope",
        "sparse:0.890625/0/0:error:slope",
    ),
    "guidance": ("", "every:2", "guidance:0.3-1"),
    "stages": ("", "stages:0.5/0.9-0.98", "stages:0.75/0.8-0.98"),
}  # fmt: skip
FIRST = ("sparse",)  # axes that all candidates cover; the others are tried on the best
ORDERS = (1, 1.5)
EARLY = (1.0, 1.35)  # how much denser the computed steps are at the beginning
LEAST = 6  # computed steps
BISECTIONS = 5  # of the seconds of a preset for a quality
KEPT = 0.34  # of the candidates of a round of halving

Seconds = Callable[[str], float]
"""A setting -> the estimated seconds of a video."""
Measure = Callable[[str, int], Sequence[float]]
"""(setting, count) -> the PSNR of the first `count` videos or more, against the full run."""
Phases = Sequence[int]
"""Steps of each expert's phase."""


@dataclass(frozen=True)
class Candidate:
    """Words of the axes, computed steps of the run, and the order of the forecast. `steps` None: all are computed."""

    words: tuple[str, ...]
    phases: tuple[int, ...]
    steps: frozenset[int] | None = None
    order: float = 1.5
    early: float = 1.0

    @property
    def setting(self) -> str:
        parts = [word for word in self.words if word]
        if self.steps is not None:
            parts.insert(0, f"pattern:{slashes(self.pattern())}")
        return "+".join(parts) or "full"

    @classmethod
    def of(cls, setting: str, plan: Plan, axes: Mapping[str, Sequence[str]]) -> Candidate:
        """The candidate of a setting of a pattern of computed steps and words of `axes`. Raises OptionError for others,
        which the search cannot change."""
        phases_of = {word.partition(":")[0]: name for name, settings in axes.items() for word in settings if word}
        chosen = dict.fromkeys(axes, "")
        steps, order = None, 1.5
        for part in setting.split("+"):
            name, _, value = part.partition(":")
            if name == "pattern":
                options = parse_pattern(value)
                steps, order = frozenset(pattern_steps(plan, options)), options.order
            elif name in phases_of:
                chosen[phases_of[name]] = part
            else:
                raise OptionError(
                    f"start {setting!r} given; a search begins with a step pattern and {', '.join(sorted(phases_of))}: "
                    f"leave {part} out"
                )
        return cls(tuple(chosen.values()), tuple(len(phase) for phase in plan.phases), steps, order)

    def pattern(self) -> PatternOptions:
        assert self.steps is not None
        total, high = sum(self.phases), self.phases[0]
        marks = "".join("1" if index in self.steps else "0" for index in range(total))
        if len(self.phases) == 1:  # one transformer: two halves, whose phases are one
            high = (total + 1) // 2
            marks = marks[:high] + "1" + marks[high + 1 :]
        return PatternOptions(high=marks[:high], low=marks[high:], order=self.order)


def spread(count: int, phases: Phases, early: float) -> frozenset[int]:
    """`count` of the steps, the first of each phase and the last of the run among them, the others evenly between
    those, or denser at the beginning (`early` above 1)."""
    total = sum(phases)
    last = max(1, total - 1)
    chosen = {sum(phases[:n]) for n in range(len(phases))} | {total - 1}
    spans = list(pairwise((step / last) ** (1 / early) for step in sorted(chosen)))
    parts = [1] * len(spans)
    for _ in range(count - len(chosen) if spans else 0):
        parts[max(range(len(spans)), key=lambda n: (spans[n][1] - spans[n][0]) / parts[n])] += 1
    for (low, high), pieces in zip(spans, parts, strict=True):
        chosen |= {round((low + (high - low) * n / pieces) ** early * last) for n in range(1, pieces)}
    while len(chosen) < min(count, total):
        chosen.add(_widest(chosen, total))
    return frozenset(chosen)


def _widest(chosen: set[int], total: int) -> int:
    """A step in the middle of the first widest gap."""
    steps = [*sorted(chosen), total]
    before, after = max(pairwise(steps), key=lambda pair: pair[1] - pair[0])
    return (before + after) // 2


@dataclass
class Search:
    """Searches settings for targets. measure: see `Measure`. count: videos of a final measurement; rungs begin with
    `first` of them. Deterministic for one `seed`."""

    phases: tuple[int, ...]
    seconds: Seconds
    measure: Measure
    count: int
    first: int
    seed: int = 0
    rounds: int = 3  # rounds of changes
    changes: int = 8  # in a round
    axes: Mapping[str, Sequence[str]] = field(default_factory=lambda: AXES)
    starts: Sequence[Candidate] = ()  # further candidates, such as what another search found
    tell: Callable[[str], None] = lambda message: None

    def within(self, target: float) -> Candidate:
        """The candidate of at most `target` seconds with the highest mean PSNR found. Raises OptionError where no
        candidate is as fast."""
        starts = [one for one in self.starts if self.seconds(one.setting) <= target]
        candidates = list({one.setting: one for one in (*starts, *self.candidates(target))}.values())
        if not candidates:
            raise OptionError(
                f"no setting of the search takes {target:.1f} s: the fastest takes {self.fastest():.1f} s; allow more"
            )
        return self.changed(self.halved(candidates), target)

    def candidates(self, target: float) -> Iterator[Candidate]:
        """Every choice of the first axes, with as many computed steps as the seconds allow."""
        first = [self.axes[name] if name in FIRST else ("",) for name in self.axes]
        for values in product(*first):
            for order, early in product(ORDERS, EARLY):
                fitted = self.fitted(Candidate(values, self.phases, None, order, early), target)
                if fitted is not None:
                    yield fitted
                if fitted is None or fitted.steps is None:
                    break  # nothing fits, or all steps do: the others are the same

    def fitted(self, one: Candidate, target: float) -> Candidate | None:
        """`one` with as many computed steps as fit into `target`; None if too few do."""
        if self.seconds(one.setting) <= target:
            return one
        fits, low, high = None, LEAST, sum(self.phases) - 1
        while low <= high:
            count = (low + high) // 2
            filled = replace(one, steps=spread(count, self.phases, one.early))
            if self.seconds(filled.setting) <= target:
                fits, low = filled, count + 1
            else:
                high = count - 1
        return fits

    def fastest(self) -> float:
        steps = spread(LEAST, self.phases, 1.0)
        return min(
            self.seconds(Candidate(values, self.phases, steps).setting) for values in product(*self.axes.values())
        )

    def halved(self, candidates: Sequence[Candidate]) -> Candidate:
        """The best of `candidates` by successive halving: each round has twice the videos, up to `count`."""
        remaining, videos = list(candidates), min(self.first, self.count)
        while True:
            scores = {one.setting: self.score(one, videos) for one in remaining}
            remaining.sort(key=lambda one: -scores[one.setting])
            self.tell(f"{len(remaining)} settings on {videos} videos, best {scores[remaining[0].setting]:.2f} dB")
            if videos == self.count:
                return remaining[0]
            remaining = remaining[: max(2, round(len(remaining) * KEPT))]
            videos = min(2 * videos, self.count)

    def score(self, one: Candidate, videos: int) -> float:
        return fmean(self.measure(one.setting, videos)[:videos])

    def changed(self, best: Candidate, target: float) -> Candidate:
        """`best`, changed in one place at a time as long as a change is better on all videos."""
        random = Random(self.seed)
        for _ in range(self.rounds):
            around = [one for one in self.around(best, target) if self.seconds(one.setting) <= target]
            tried = random.sample(around, min(self.changes, len(around)))
            if not tried:
                return best
            winner = self.halved(tried)
            if self.score(winner, self.count) > self.score(best, self.count):
                best = winner
        return best

    def around(self, best: Candidate, target: float) -> list[Candidate]:
        """Changes of one place: a computed step that moves, another word of an axis, another order."""
        changes: dict[str, Candidate] = {}
        starts = {sum(self.phases[:n]) for n in range(len(self.phases))} | {sum(self.phases) - 1}
        for step in sorted(best.steps or ()):
            for moved in (step - 1, step + 1):
                if step not in starts and moved not in (best.steps or ()):
                    one = replace(best, steps=(best.steps or frozenset()) - {step} | {moved})
                    changes[one.setting] = one
        for axis, choices in enumerate(self.axes.values()):
            for word in choices:
                values = (*best.words[:axis], word, *best.words[axis + 1 :])
                one = self.fitted(replace(best, words=values, steps=None), target)
                if one is not None:
                    changes[one.setting] = one
        for order in ORDERS:
            one = replace(best, order=order)
            changes[one.setting] = one
        changes.pop(best.setting, None)
        return list(changes.values())


def least_seconds(search: Search, bound: float, full: float) -> Candidate:
    """The fastest candidate found whose mean PSNR reaches `bound`, by bisection of the seconds of a target; the full
    run where none does. full: its seconds."""
    low, high, best = search.fastest(), full, Candidate(tuple("" for _ in search.axes), search.phases)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        try:
            candidate = search.within(middle)
        except OptionError:  # no candidate is as fast
            low = middle
            continue
        if search.score(candidate, search.count) >= bound:
            best, high = candidate, min(middle, search.seconds(candidate.setting))
        else:
            low = middle
    return best

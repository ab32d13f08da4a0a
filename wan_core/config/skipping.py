"""Options that save work in a run: step caching, guidance schedule and sparse attention (`Request.skip`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from wan_core.config.checks import OptionError
from wan_core.config.table import Checked, check, option

MAGCACHE_RULES = ("joint", "published")
ADAPTIVE_RULES = ("change", "bound")
MAX_MARKS = 1000  # of a step pattern
ORDER = {"name": "forecast order", "low": 0, "high": 2, "advice": "0 reuses, 1, 1.5 and 2 extrapolate"}
THRESHOLD = {"low": 0, "high": 10, "step": 0.01, "digits": 0.0001, "advanced": True}
SKIPS = {"low": 0, "high": 50}
SIGMA = {"most": 1, "step": 0.01, "digits": 0.0001}
RETENTION = {
    "low": 0,
    "high": 1,
    "tip": "Share of each expert's steps, from its first one, that are always computed.",
    "shown": 0.2,
    "step": 0.05,
    "digits": 0.001,
    "advanced": True,
}


@dataclass(frozen=True, kw_only=True)
class MagCacheOptions(Checked):
    """Reuse the residual of the transformer's blocks while a measured curve says that its magnitude changes little.

    Published as E012K2R20: threshold 0.12, at most 2 skips in a row, 20 % retained. rule: "joint" decides for both
    guidance branches, "published" for each. order: of the forecast of a skipped step, 0 the last residual, 1.5 the mean
    of 1 and 2. `wan_core.sampling.cache.magcache` has the rules, the presets and their source. Raises OptionError.
    """

    threshold: float = option(
        name="magcache threshold",
        advice="published values are 0.02 to 0.24",
        tip="For custom: accumulated error of the residual's magnitude at which a step is computed again. quality "
        "has 0.06, balanced and fast 0.24.",
        shown=0.12,
        **THRESHOLD,
    )
    max_skips: int = option(
        name="magcache skips in a row",
        **SKIPS,
        advice="published values are 2 to 4",
        tip="For custom: maximum number of steps skipped in a row. quality and balanced have 1, fast 2.",
        shown=2,
        advanced=True,
    )
    retention: float = option(
        name="magcache retention", advice="a share of the steps; published values: 0.1 to 0.4", **RETENTION
    )
    rule: str = option(
        "joint",
        name="magcache rule",
        choices=MAGCACHE_RULES,
        tip="joint: one decision for both guidance branches. published: one decision for each branch, as in the "
        "paper, for comparison.",
        advanced=True,
    )
    order: float = option(
        0,
        **ORDER,
        tip="For custom: what a skipped step uses. 0: the last residual, as published. 1 or 2: a forecast from the "
        "last residuals, closer to the full run, with more memory. The presets have 2.",
        shown=1,
        advanced=True,
    )


@dataclass(frozen=True, kw_only=True)
class TaylorSeerOptions(Checked):
    """Compute every `interval`-th step; forecast the residual of the steps in between. Raises OptionError."""

    interval: int = option(
        name="taylorseer interval",
        low=1,
        high=50,
        advice="1 computes every step",
        tip="Compute every n-th step; 1 computes all steps.",
        shown=2,
    )
    order: float = option(
        1,
        **ORDER,
        tip="0 reuses the last residual, 1 and 2 extrapolate.",
        shown=1,
    )
    retention: float = option(0.2, name="taylorseer retention", advice="a share of the steps", **RETENTION)


@dataclass(frozen=True, kw_only=True)
class PatternOptions:
    """Compute the steps that a pattern marks with 1, forecast those it marks with 0. Raises OptionError.

    A pattern covers an expert's steps, however many there are: its n-th mark stands for the same share of the phase.
    Models with one transformer use both patterns, one after the other. `wan_core.sampling.cache.policies` has the rule.
    """

    high: str
    low: str
    order: float = option(1.5, **ORDER)

    def __post_init__(self) -> None:
        check(self)
        for name, marks in (("high", self.high), ("low", self.low)):
            if not 1 <= len(marks) <= MAX_MARKS or set(marks) - {"0", "1"} or marks[0] != "1":
                raise OptionError(
                    f"step pattern {marks!r} given for the {name}-noise expert; write 1 to {MAX_MARKS} marks, 1 for "
                    "each computed step and 0 for each skipped one, the first one 1: 1101010"
                )


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptions(Checked):
    """Decide during the run which steps to skip, from what it measures. The plan therefore shows only which steps may
    be skipped. rule: "change" reuses the last residual while the estimated change of the velocity stays below
    `threshold`; "bound" forecasts it while the error of the forecast, judged at computed steps, stays below. Raises
    OptionError."""

    threshold: float = option(
        name="adaptive threshold",
        advice="0.05 is careful, 0.2 is fast",
        tip="Accumulated relative change of the velocity, as estimated, up to which steps are skipped.",
        shown=0.1,
        **THRESHOLD,
    )
    max_skips: int = option(
        3,
        name="adaptive skips in a row",
        **SKIPS,
        advice="2 to 4 are usual",
        tip="Maximum number of steps skipped in a row.",
    )
    retention: float = option(0.2, name="adaptive retention", advice="a share of the steps", **RETENTION)
    rule: str = option(
        "change",
        name="adaptive rule",
        choices=ADAPTIVE_RULES,
        tip="change: the last residual is reused while the velocity changes little. bound: it is forecast while the "
        "error of forecasts, judged at the computed steps, stays below the threshold: 0.1 is careful, 0.4 fast.",
        added=True,
    )


@dataclass(frozen=True, kw_only=True)
class GuidanceOptions:
    """Guidance schedule: steps that run only the conditional branch. Raises OptionError.

    Steps whose sigma lies outside `low` to `high` run without guidance. Inside, the difference between the branches is
    computed at every `every`-th guided step of an expert and reused in between.
    """

    low: float = option(0.0, tip="No guidance in steps below this sigma (share of noise).", least=0, **SIGMA)
    high: float = option(1.0, tip="No guidance in steps above this sigma (share of noise).", least=0, **SIGMA)
    every: int = option(
        1,
        name="guidance every",
        low=1,
        high=50,
        advice="1 runs the unconditional branch at every guided step",
        tip="Compute the unconditional branch at every n-th guided step; the other guided steps reuse the "
        "difference between the branches. 1 computes it at every step.",
        shown=2,
    )

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise OptionError(
                f"guidance from sigma {self.low} to {self.high} given; allowed are 0 to 1, the lower one first: 0.2-0.9"
            )
        check(self)


SPARSE_KERNELS = ("auto", "cudnn-fp8", "cudnn", "flex", "math", "triton", "triton-int8")
SPARSE_SCORES = ("mean", "spread", "error")
SPARSE_PARTS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class SparseOptions:
    """Block-sparse self-attention: every query block reads only selected key blocks. Raises OptionError.

    dense_steps, ramp: shares of the run, from its first step, that read all blocks, and twice as many as later steps.
    mass: select blocks up to this estimated share of attention, None the same number for each row; floor: the least
    share of the blocks that is read then. score: blocks are ranked by the mean of their keys, also by their variance
    ("spread"), or by the error where they are replaced by their means. pooled: unselected blocks are replaced by their
    mean, or by those of `parts` parts of them; slope: their values follow the scores of their keys, to first order.
    reuse: number of computed steps that use one selection, the step that made it included. budgets: use calibrated
    shares of blocks per layer if the checkpoint has a coverage file beside it.
    bound: the run measures the relative error of attention's output and reads as much as keeps it at most so large, in
    every layer; `sparsity` is what is expected then, `ramp` the share of the run, from its first step, in which a third
    of the bound holds, and `floor` the least share of the blocks that is read.

    `wan_core.sampling.sparsity` has the presets and the schedule, `wan_core.ops.attention.sparse` the computation.
    """

    sparsity: float = option(
        low=0,
        high=0.99,
        advice="0.5 is careful, 0.875 fast",
        tip="For custom: the share of the key blocks that attention does not read. quality has 0.5, balanced "
        "0.8125, fast 0.875.",
        shown=0.75,
        step=0.05,
        digits=0.0001,
    )
    dense_steps: float = option(
        0.05,
        name="share of dense steps",
        low=0,
        high=1,
        advice="a share of the steps",
        tip="For custom: share of the steps, from the first one, with dense attention. These steps fix the layout "
        "of the video. quality has 0.1, balanced and fast 0.",
        step=0.05,
        digits=0.001,
    )
    ramp: float = option(
        0.3,
        low=0,
        high=1,
        advice="a share of the steps, 0 turns it off",
        tip="For custom: share of the steps, from the first one, that read twice as many blocks as later steps, at "
        "most half of all. Has no effect at a sparsity of 0.5 or less. The presets have 0.3.",
        step=0.05,
        digits=0.001,
        advanced=True,
        prefix="ramp",
    )
    dense_layers: int = option(
        0,
        low=0,
        high=1000,
        advice="0 to 2 are usual",
        tip="For custom: number of first layers that always use dense attention.",
        most=100,
        advanced=True,
    )
    mass: float | None = option(
        None,
        name="attention mass",
        low=0.01,
        high=1,
        advice="0.9 is usual",
        tip="For custom: select blocks until this estimated share of attention is covered, up to the number that "
        "sparsity allows. 0: the same number of blocks for all tokens. Not with FP8 attention.",
        shown=0.0,
        least=0,
        step=0.05,
        digits=0.001,
        advanced=True,
        prefix="mass",
    )
    floor: float = option(0.05, low=0, high=1, advice="a share of the blocks", prefix="floor")
    score: Literal["mean", "spread", "error"] = option(
        "spread", name="block score", choices=SPARSE_SCORES, words={name: name for name in SPARSE_SCORES}
    )
    pooled: bool = option(
        True,
        tip="For custom: unselected blocks are replaced by their mean. Costs little and preserves quality.",
        advanced=True,
        words={"alone": False},
    )
    parts: int = option(1, prefix="parts")
    slope: bool = option(False, words={"slope": True})
    reuse: int = option(
        1,
        name="steps per selection of blocks",
        low=1,
        high=50,
        advice="1 selects again in every step",
        tip="For custom: number of computed steps that use one selection of blocks. 1 selects in every step.",
        advanced=True,
        prefix="reuse",
    )
    budgets: bool = option(True, words={"even": False})
    kernel: str = option(
        "auto",
        name="sparse kernel",
        choices=SPARSE_KERNELS,
        tip="auto uses the fastest kernel that runs here: FP8 if the loader's attention is FP8 (Hopper).",
        words={name: name for name in SPARSE_KERNELS},
    )
    bound: float | None = option(
        None,
        name="bound on the error of attention",
        low=0.001,
        high=1,
        advice="0.03 is careful, 0.12 fast",
        tip="For the preset bound: the run measures how far each layer's attention is from dense attention, and reads "
        "as much as keeps this relative error. 0.03 is careful, 0.12 fast. The steps are not known beforehand.",
        shown=0.06,
        step=0.01,
        digits=0.0001,
        added=True,
    )

    def __post_init__(self) -> None:
        check(self)
        if self.bound is not None and (self.mass is not None or self.dense_steps or not self.sparsity):
            raise OptionError(
                "a bound on the error of attention decides in the run how much is read: leave attention mass and dense "
                "steps out"
            )
        if self.parts not in SPARSE_PARTS:
            raise OptionError(f"{self.parts} parts of a block given; allowed are {', '.join(map(str, SPARSE_PARTS))}")
        if self.mass is not None and self.score == "error":
            raise OptionError("attention mass with the block score error given; mass needs the score spread")
        finer = {"parts of a block": self.parts > 1, "slope": self.slope, "block score error": self.score == "error"}
        if any(finer.values()) and not self.pooled:
            raise OptionError(
                f"{' and '.join(name for name, asked in finer.items() if asked)} given without the means of unselected "
                "blocks (pooled off, alone); allow the means, or leave this out"
            )


STAGE_POSITIONS = ("video", "own")


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """Steps whose sigma is from `low` to `high` run at `scale` times the width and height. Raises OptionError.

    positions: rotary positions of rows and columns, the video's, or the smaller size's "own", from 0. every: each n-th
    step of the stage runs at full size, which brings its details up to date; 0: none.
    """

    scale: float = option(
        name="scale of a stage",
        low=0.25,
        high=1,
        advice="0.5 has a quarter of the tokens, 1 all of them",
        tip="Part of the width and height at which the steps below run. 0.75 is careful, 0.5 is fast.",
        shown=0.5,
        step=0.05,
        digits=0.0001,
    )
    low: float = option(
        tip="Steps below this sigma (share of noise) run at full size: details come from them.",
        shown=0.9,
        least=0.01,
        **SIGMA,
    )
    high: float = option(
        1.0,
        tip="Steps above this sigma (share of noise) run at full size: the layout comes from them.",
        shown=0.98,
        least=0.01,
        **SIGMA,
    )
    positions: str = option(
        "video",
        name="positions of a stage",
        choices=STAGE_POSITIONS,
        tip="Rotary positions of rows and columns in smaller steps. video: those of the video, further apart. own: "
        "counted from 0, as in a video of that size.",
        advanced=True,
        added=True,
        words={name: name for name in STAGE_POSITIONS},
    )
    every: int = option(
        0,
        tip="Every n-th of these steps runs at full size all the same, which brings the details up to date. 0: none.",
        shown=3,
        least=0,
        most=50,
        advanced=True,
        added=True,
        prefix="every",
    )

    def __post_init__(self) -> None:
        if self.every == 1 or not 0 <= self.every <= 50:
            raise OptionError(
                f"every {self.every} given for a stage; allowed are 0 (no step of it at full size) and 2 to 50"
            )
        check(self)
        if not 0 < self.low < self.high <= 1:
            raise OptionError(
                f"stage from sigma {self.low:g} to {self.high:g} given; allowed are sigmas above 0 and up to 1, the "
                "lower one first: 0.9-0.98"
            )


@dataclass(frozen=True, kw_only=True)
class SkipOptions:
    """Step caching, guidance schedule, sparse attention and resolution schedule of a generation. At most one step cache
    may be set; it can be combined with the others. Stages are kept by falling sigma. Raises OptionError."""

    magcache: MagCacheOptions | None = None
    taylorseer: TaylorSeerOptions | None = None
    adaptive: AdaptiveOptions | None = None
    guidance: GuidanceOptions | None = None
    pattern: PatternOptions | None = None
    sparse: SparseOptions | None = None
    stages: tuple[StageOptions, ...] = ()
    # Of the runs that a speed preset was measured in; None: it is for any number of steps, or there is no preset.
    measured_steps: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(sorted(self.stages, key=lambda stage: -stage.low)))
        for above, below in pairwise(self.stages):
            if below.high > above.low:
                raise OptionError(
                    f"stages from sigma {above.low:g} to {above.high:g} and from {below.low:g} to {below.high:g} "
                    "overlap: a step has one size"
                )
        caches = [name for name in ("magcache", "taylorseer", "adaptive", "pattern") if getattr(self, name) is not None]
        if len(caches) > 1:
            raise OptionError(f"{' and '.join(caches)} given; only one step cache can run: choose one of them")

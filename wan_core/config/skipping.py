"""Options that save work in a run: step caching, guidance schedule and sparse attention (`Request.skip`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from wan_core.config.checks import OptionError, check_choice, check_range

MAGCACHE_RULES = ("joint", "published")
MAX_MARKS = 1000  # of a step pattern


@dataclass(frozen=True, kw_only=True)
class MagCacheOptions:
    """Reuse the residual of the transformer's blocks while a measured curve says that its magnitude changes little.

    Published as E012K2R20: threshold 0.12, at most 2 skips in a row, 20 % retained.
    `wan_core.sampling.cache.magcache` has the rules, the presets and their source. Raises OptionError.
    """

    threshold: float  # accumulated relative error of the magnitude up to which a step is skipped
    max_skips: int  # most steps skipped in a row
    retention: float  # share of each expert's steps, from its first one, that are always computed
    rule: str = "joint"  # "joint": one decision for both guidance branches; "published": one for each branch
    order: float = 0  # order of the forecast of a skipped step; 0: the last residual; 1.5: the mean of 1 and 2

    def __post_init__(self) -> None:
        check_choice("magcache rule", self.rule, MAGCACHE_RULES)
        check_range("magcache threshold", self.threshold, 0, 10, "published values are 0.02 to 0.24")
        check_range("magcache skips in a row", self.max_skips, 0, 50, "published values are 2 to 4")
        check_range("magcache retention", self.retention, 0, 1, "a share of the steps; published values: 0.1 to 0.4")
        check_range("forecast order", self.order, 0, 2, "0 reuses, 1, 1.5 and 2 extrapolate")


@dataclass(frozen=True, kw_only=True)
class TaylorSeerOptions:
    """Compute every `interval`-th step; forecast the residual of the steps in between. Raises OptionError."""

    interval: int
    order: float = 1
    retention: float = 0.2  # as for MagCache

    def __post_init__(self) -> None:
        check_range("taylorseer interval", self.interval, 1, 50, "1 computes every step")
        check_range("forecast order", self.order, 0, 2, "0 reuses, 1, 1.5 and 2 extrapolate")
        check_range("taylorseer retention", self.retention, 0, 1, "a share of the steps")


@dataclass(frozen=True, kw_only=True)
class PatternOptions:
    """Compute the steps that a pattern marks with 1, forecast those it marks with 0. Raises OptionError.

    A pattern covers an expert's steps, however many there are: its n-th mark stands for the same share of the phase.
    Models with one transformer use both patterns, one after the other. `wan_core.sampling.cache.policies` has the rule.
    """

    high: str
    low: str
    order: float = 1.5

    def __post_init__(self) -> None:
        check_range("forecast order", self.order, 0, 2, "0 reuses, 1, 1.5 and 2 extrapolate")
        for name, marks in (("high", self.high), ("low", self.low)):
            if not 1 <= len(marks) <= MAX_MARKS or set(marks) - {"0", "1"} or marks[0] != "1":
                raise OptionError(
                    f"step pattern {marks!r} given for the {name}-noise expert; write 1 to {MAX_MARKS} marks, 1 for "
                    "each computed step and 0 for each skipped one, the first one 1: 1101010"
                )


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptions:
    """Decide during the run which steps to skip, from the measured rate of change of the velocity. The plan therefore
    shows only which steps may be skipped. Raises OptionError."""

    threshold: float  # accumulated relative change of the velocity, as estimated, at which a step computes again
    max_skips: int = 3
    retention: float = 0.2  # as for MagCache

    def __post_init__(self) -> None:
        check_range("adaptive threshold", self.threshold, 0, 10, "0.05 is careful, 0.2 is fast")
        check_range("adaptive skips in a row", self.max_skips, 0, 50, "2 to 4 are usual")
        check_range("adaptive retention", self.retention, 0, 1, "a share of the steps")


@dataclass(frozen=True, kw_only=True)
class GuidanceOptions:
    """Guidance schedule: steps that run only the conditional branch. Raises OptionError.

    Steps whose sigma lies outside `low` to `high` run without guidance. Inside, the difference between the branches is
    computed at every `every`-th guided step of an expert and reused in between.
    """

    low: float = 0.0
    high: float = 1.0
    every: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise OptionError(
                f"guidance from sigma {self.low} to {self.high} given; allowed are 0 to 1, the lower one first: 0.2-0.9"
            )
        check_range("guidance every", self.every, 1, 50, "1 runs the unconditional branch at every guided step")


SPARSE_KERNELS = ("auto", "cudnn-fp8", "cudnn", "flex", "math", "triton", "triton-int8")
SPARSE_SCORES = ("mean", "spread", "error")
SPARSE_PARTS = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class SparseOptions:
    """Block-sparse self-attention: every query block reads only selected key blocks. Raises OptionError.

    `wan_core.sampling.sparsity` has the presets and the schedule, `wan_core.ops.attention.sparse` the computation.
    """

    sparsity: float  # share of the key blocks that a sparse step does not read
    dense_steps: float = 0.05  # share of the run, from its first step, that reads all blocks
    ramp: float = 0.3  # share of the run, from its first step, that reads twice as many blocks, at most half of all
    dense_layers: int = 0  # number of first layers that always read all blocks
    mass: float | None = None  # select blocks up to this estimated share of attention; None: the same number per row
    floor: float = 0.05  # least share of the blocks to read where `mass` decides
    # How blocks are ranked. "mean": by the mean of their keys; "spread": also by their variance; "error": by the error
    # where they are replaced by their means.
    score: Literal["mean", "spread", "error"] = "spread"
    pooled: bool = True  # unselected blocks are replaced by their mean
    parts: int = 1  # of an unselected block, each replaced by its own mean
    slope: bool = False  # the values of unselected blocks follow the scores of their keys, to first order
    reuse: int = 1  # number of computed steps that use one selection of blocks, the step that made it included
    budgets: bool = True  # use calibrated shares of blocks per layer if the checkpoint has a coverage file beside it
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_choice("sparse kernel", self.kernel, SPARSE_KERNELS)
        check_choice("block score", self.score, SPARSE_SCORES)
        check_range("sparsity", self.sparsity, 0, 0.99, "0.5 is careful, 0.875 fast")
        check_range("share of dense steps", self.dense_steps, 0, 1, "a share of the steps")
        check_range("ramp", self.ramp, 0, 1, "a share of the steps, 0 turns it off")
        check_range("dense layers", self.dense_layers, 0, 1000, "0 to 2 are usual")
        check_range("floor", self.floor, 0, 1, "a share of the blocks")
        check_range("steps per selection of blocks", self.reuse, 1, 50, "1 selects again in every step")
        if self.parts not in SPARSE_PARTS:
            raise OptionError(f"{self.parts} parts of a block given; allowed are {', '.join(map(str, SPARSE_PARTS))}")
        if self.mass is not None:
            check_range("attention mass", self.mass, 0.01, 1, "0.9 is usual")
            if self.score == "error":
                raise OptionError("attention mass with the block score error given; mass needs the score spread")
        finer = {"parts of a block": self.parts > 1, "slope": self.slope, "block score error": self.score == "error"}
        if any(finer.values()) and not self.pooled:
            raise OptionError(
                f"{' and '.join(name for name, given in finer.items() if given)} given without the means of unselected "
                "blocks (pooled off, alone); allow the means, or leave this out"
            )


STAGE_POSITIONS = ("video", "own")


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """Steps whose sigma is from `low` to `high` run at `scale` times the width and height. Raises OptionError."""

    scale: float
    low: float
    high: float = 1.0
    positions: str = "video"  # rotary positions of rows and columns: the video's, or the smaller size's "own", from 0
    every: int = 0  # every n-th step of the stage runs at full size, which brings its details up to date; 0: none

    def __post_init__(self) -> None:
        if self.every == 1 or not 0 <= self.every <= 50:
            raise OptionError(
                f"every {self.every} given for a stage; allowed are 0 (no step of it at full size) and 2 to 50"
            )
        check_choice("positions of a stage", self.positions, STAGE_POSITIONS)
        check_range("scale of a stage", self.scale, 0.25, 1, "0.5 has a quarter of the tokens, 1 all of them")
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

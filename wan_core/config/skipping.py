"""Which forwards of a run need not run, and how much of attention: what `Request.skip` takes."""

from __future__ import annotations

from dataclasses import dataclass

from wan_core.config.checks import OptionError, check_choice, check_range

MAGCACHE_RULES = ("joint", "published")


@dataclass(frozen=True, kw_only=True)
class MagCacheOptions:
    """Reuse the residual of the transformer's blocks while its magnitude is known to change little.

    Published as E012K2R20: threshold 0.12, at most 2 skips in a row, 20 % retained.
    `wan_core.sampling.cache.magcache` has the
    rules, the presets and their source.
    """

    threshold: float  # accumulated error of magnitude up to which a step is skipped
    max_skips: int  # in a row
    retention: float  # share of every phase, from its first step on, that always computes
    rule: str = "joint"  # "joint": both guidance branches decide together; "published": each for itself
    order: int = 0  # of the forecast a skipped step uses; 0 reuses the last residual as it is

    def __post_init__(self) -> None:
        check_choice("magcache rule", self.rule, MAGCACHE_RULES)
        check_range("magcache threshold", self.threshold, 0, 10, "published ones are 0.02 to 0.24")
        check_range("magcache skips in a row", self.max_skips, 0, 50, "published ones are 2 to 4")
        check_range("magcache retention", self.retention, 0, 1, "a share of the steps, published ones are 0.1 to 0.4")
        check_range("forecast order", self.order, 0, 2, "0 reuses, 1 and 2 extrapolate")


@dataclass(frozen=True, kw_only=True)
class TaylorSeerOptions:
    """Compute every `interval`-th step and forecast the residual of the blocks in between from past ones."""

    interval: int
    order: int = 1
    retention: float = 0.2  # as for MagCache

    def __post_init__(self) -> None:
        check_range("taylorseer interval", self.interval, 1, 50, "1 computes every step")
        check_range("forecast order", self.order, 0, 2, "0 reuses, 1 and 2 extrapolate")
        check_range("taylorseer retention", self.retention, 0, 1, "a share of the steps")


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptions:
    """Decide while running, from how fast the velocity was seen to change: not known before, so not in the plan."""

    threshold: float  # estimated relative change of the velocity that may add up before a step computes again
    max_skips: int = 3
    retention: float = 0.2  # as for MagCache

    def __post_init__(self) -> None:
        check_range("adaptive threshold", self.threshold, 0, 10, "0.05 is careful, 0.2 is fast")
        check_range("adaptive skips in a row", self.max_skips, 0, 50, "2 to 4 are usual")
        check_range("adaptive retention", self.retention, 0, 1, "a share of the steps")


@dataclass(frozen=True, kw_only=True)
class GuidanceOptions:
    """Steps that do without the unconditional branch.

    Outside of sigma `low` to `high` there is no guidance. Inside, the difference of the branches is computed every
    `every`-th step of a phase and reused in between.
    """

    low: float = 0.0
    high: float = 1.0
    every: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise OptionError(
                f"guidance from sigma {self.low} to {self.high} given; both are shares of the noise from 0 to 1, the "
                "lower one first: 0.2-0.9"
            )
        check_range("guidance every", self.every, 1, 50, "1 runs the unconditional branch at every guided step")


SPARSE_KERNELS = ("auto", "cudnn-fp8", "cudnn", "flex", "math")
SPARSE_SCORES = ("mean", "spread")


@dataclass(frozen=True, kw_only=True)
class SparseOptions:
    """Self-attention that reads a part of the keys: `wan_core.sampling.sparsity` has the presets and the schedule,
    `wan_core.ops.attention.sparse` the arithmetic."""

    sparsity: float  # share of the blocks of keys that a sparse step leaves out
    dense_steps: float = 0.05  # share of the run, from its first step on, that reads everything
    ramp: float = 0.3  # share of the run, from its first step on, that reads twice as much, half at most
    dense_layers: int = 0  # so many of the first layers read everything, always
    mass: float | None = None  # stop at this share of the attention as estimated; None: as many blocks for every row
    floor: float = 0.05  # share of the blocks that is read at least, where `mass` decides
    score: str = "spread"  # "mean": by the means of blocks alone; "spread": and by how their keys scatter
    pooled: bool = True  # blocks that are left out stand in by their means
    reuse: int = 1  # computed steps that use a choice of blocks, the one it was made for included
    budgets: bool = True  # share out blocks between layers as calibrated, where a file beside the checkpoint says how
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_choice("sparse kernel", self.kernel, SPARSE_KERNELS)
        check_choice("score of blocks", self.score, SPARSE_SCORES)
        check_range("sparsity", self.sparsity, 0, 0.99, "0.5 is careful, 0.875 fast")
        check_range("share of dense steps", self.dense_steps, 0, 1, "a share of the steps")
        check_range("ramp", self.ramp, 0, 1, "a share of the steps, 0 has none")
        check_range("dense layers", self.dense_layers, 0, 1000, "0 to 2 are usual")
        check_range("floor", self.floor, 0, 1, "a share of the blocks")
        check_range("steps that use a choice of blocks", self.reuse, 1, 50, "1 chooses anew in every step")
        if self.mass is not None:
            check_range("mass of attention", self.mass, 0.01, 1, "0.9 is usual")


@dataclass(frozen=True, kw_only=True)
class SkipOptions:
    """Which forwards of a generation need not run, and how much of attention. One policy at most decides about whole
    steps."""

    magcache: MagCacheOptions | None = None
    taylorseer: TaylorSeerOptions | None = None
    adaptive: AdaptiveOptions | None = None
    guidance: GuidanceOptions | None = None
    sparse: SparseOptions | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("magcache", "taylorseer", "adaptive") if getattr(self, name) is not None]
        if len(given) > 1:
            raise OptionError(f"{' and '.join(given)} given; each decides which steps are skipped: choose one of them")

"""Options of sparse attention (`SkipOptions.sparse`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wan_core.config.checks import OptionError
from wan_core.config.table import check, option

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
    reuse: number of computed steps that use one selection, the step that made it included.
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

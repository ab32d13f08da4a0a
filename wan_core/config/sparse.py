"""Options of sparse attention (`SkipOptions.sparse`)."""

from __future__ import annotations

from dataclasses import dataclass

from wan_core.config.checks import OptionError
from wan_core.config.table import Checked, option, parse_words, read_slashes, slashes, spelled

SPARSE_KERNELS = ("auto", "cudnn-fp8", "cudnn", "flex", "math")


@dataclass(frozen=True, kw_only=True)
class SparseOptions(Checked):
    """Block-sparse self-attention: every query block reads only selected key blocks. Raises OptionError.

    ramp: share of the run, from its first step, that reads twice as many blocks as later steps.
    slope: the values of blocks that are not read follow the scores of their keys; otherwise their means stand for them.

    `wan_core.sampling.sparsity` has the schedule, `wan_core.ops.attention.sparse` the computation.
    """

    sparsity: float = option(
        low=0,
        high=0.99,
        advice="0.5 is careful, 0.875 fast",
        tip="Sparse attention: the share of the key blocks that attention does not read; 0 reads all.",
        shown=0.0,
        step=0.05,
    )
    ramp: float = option(
        0.3,
        low=0,
        high=1,
        advice="a share of the steps, 0 turns it off",
        tip="Share of the steps, from the first one, that read twice as many blocks as later steps, at most half of "
        "all. Has no effect at a sparsity of 0.5 or less.",
        step=0.05,
        advanced=True,
        prefix="ramp",
    )
    slope: bool = option(
        True,
        tip="The values of blocks that are not read follow the scores of their keys, to first order. Off: "
        "their means alone, which saves 8 % of the time of dense attention.",
        advanced=True,
        words={"means": False},
    )
    kernel: str = option(
        "auto",
        name="sparse kernel",
        choices=SPARSE_KERNELS,
        tip="Of sparse attention: auto uses the fastest kernel that runs here, FP8 if the model's attention is FP8 "
        "(Hopper).",
        words={name: name for name in SPARSE_KERNELS},
    )

    @classmethod
    def parse(cls, text: str) -> SparseOptions:
        """A sparsity, then options after colons: `0.5:cudnn`, `0.8125:ramp0.2`. Raises OptionError."""
        first, *settings = text.split(":")
        try:
            values = read_slashes(cls, first, "sparsity")
            values |= parse_words(cls, settings)
        except ValueError as fault:
            raise OptionError(
                f"sparse {text!r} given; write a sparsity such as 0.8125, then after a colon ramp0.3, "
                f"means (without slopes) or a kernel ({', '.join(SPARSE_KERNELS)}), or --speed with a word"
            ) from fault
        return cls(**values)

    def words(self) -> str:
        """The form that `parse` reads: `0.75:ramp0.2`."""
        return ":".join([slashes(self, "sparsity"), *spelled(self, "ramp", "slope", "kernel")])

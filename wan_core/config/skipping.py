"""Options that save work in a run: step caching and sparse attention (`Request.skip`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from wan_core.config.checks import OptionError, check_choice
from wan_core.config.sparse import SparseOptions
from wan_core.config.table import Checked, option, parse_slashes, table

MAGCACHE_NAME = re.compile(r"E(\d)(\d\d)K(\d+)R(\d\d)", re.IGNORECASE)
EXACT = "exact"
SPEEDS = (EXACT, "careful", "balanced", "fast")
RETENTION = {
    "low": 0,
    "high": 1,
    "tip": "Share of each expert's steps, from its first one, that are always computed.",
    "shown": 0.2,
    "step": 0.05,
    "advanced": True,
}


@dataclass(frozen=True, kw_only=True)
class MagCacheOptions(Checked):
    """Reuse the residual of the transformer's blocks while a measured curve says that its magnitude changes little.

    Published as E012K2R20: threshold 0.12, at most 2 skips in a row, 20 % retained. `wan_core.sampling.cache.magcache`
    has the rule and its source. Raises OptionError.
    """

    threshold: float = option(
        name="magcache threshold",
        advice="published values are 0.02 to 0.24",
        tip="magcache: accumulated error of the residual's magnitude at which a step is computed again.",
        low=0,
        high=10,
        shown=0.12,
        step=0.01,
    )
    max_skips: int = option(
        name="magcache skips in a row",
        low=0,
        high=50,
        advice="published values are 2 to 4",
        tip="magcache: maximum number of steps skipped in a row.",
        shown=2,
    )
    retention: float = option(
        name="magcache retention", advice="a share of the steps; published values: 0.1 to 0.4", **RETENTION
    )

    @classmethod
    def parse(cls, text: str) -> MagCacheOptions:
        """`threshold/skips/retention` such as 0.12/2/0.2, or the same as E012K2R20. Raises OptionError."""
        name = MAGCACHE_NAME.fullmatch(text)
        numbers = f"{name[1]}.{name[2]}/{name[3]}/0.{name[4]}" if name else text
        return parse_slashes(
            cls, numbers, "magcache: threshold/skips in a row/retention such as 0.12/2/0.2 (published as E012K2R20), "
            "or --speed with a word",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TaylorSeerOptions(Checked):
    """Compute every `interval`-th step; forecast the residual of the steps in between. Raises OptionError."""

    interval: int = option(
        name="taylorseer interval",
        low=1,
        high=50,
        advice="1 computes every step",
        tip="taylorseer: compute every n-th step; 1 computes all steps.",
        shown=2,
    )
    retention: float = option(0.2, name="taylorseer retention", low=0, high=1, advice="a share of the steps")

    @classmethod
    def parse(cls, text: str) -> TaylorSeerOptions:
        """`interval/retention`, of which the last may be missing. Raises OptionError."""
        return parse_slashes(cls, text, "taylorseer: interval/retention such as 2/0.2")


@dataclass(frozen=True, kw_only=True)
class SkipOptions:
    """Step caching and sparse attention of a generation: a word of `speed` (`wan_core.sampling.cache.speed` says what
    it does in a run), or settings. At most one step cache may be set. Raises OptionError."""

    speed: str = option(
        EXACT,
        choices=SPEEDS,
        help="careful, balanced and fast forecast 30, 38 and 53 %% of 40 steps, 0, 15 and 30 %% of 20; with "
        "step-distilled weights, and below 10 steps, balanced reads half of attention's keys, fast a third; all take "
        "8-bit attention where --attention is auto (default %(default)s: nothing is left out)",
        tip="exact leaves nothing out. careful, balanced and fast forecast 30, 38 and 53 % of 40 steps, 0, 15 and 30 % "
        "of 20. With step-distilled weights, and below 10 steps, balanced reads half of attention's keys, fast a "
        "third. All but exact take the card's 8-bit attention where attention is auto.",
    )
    magcache: MagCacheOptions | None = option(
        None,
        help="step cache, threshold/skips in a row/retention: 0.12/2/0.2 (published as E012K2R20)",
        metavar="T/K/R",
    )
    taylorseer: TaylorSeerOptions | None = option(
        None,
        help="compute every N-th step, forecast the others; interval/retention: 2/0.2",
        metavar="N[/R]",
    )
    sparse: SparseOptions | None = option(
        None,
        help="block-sparse self-attention: sparsity such as 0.8125; then after colons ramp0 "
        "(default ramp0.3; of no effect up to 0.5), means or a kernel (docs/sparse.md)",
        metavar="S",
    )

    def __post_init__(self) -> None:
        check_choice("speed", self.speed, SPEEDS)
        settings = [name for name in ("magcache", "taylorseer", "sparse") if getattr(self, name) is not None]
        if self.speed != EXACT and settings:
            raise OptionError(
                f"speed {self.speed} and {settings[0]} given, which speed sets too: leave one of them out"
            )
        if self.magcache is not None and self.taylorseer is not None:
            raise OptionError("magcache and taylorseer given; only one step cache can run: choose one of them")


def parse_setting(text: str) -> SkipOptions | None:
    """A setting in one word, as the command `quality` has it: parts joined by `+`. Raises OptionError.

    The parts are `magcache:0.12/2/0.2`, `taylorseer:2/0.2` and `sparse:0.8125:ramp0`; `full` is
    the run without any of them, `speed:balanced` a word of `speed`.
    """
    if text == "full":
        return None
    values: dict[str, Any] = {}
    options = table(SkipOptions)
    for part in text.split("+"):
        name, _, value = part.partition(":")
        if not value or name in values or name not in options:
            raise OptionError(
                f"setting {text!r} is not known, or repeats a part; write speed:balanced, magcache:0.12/2/0.2, "
                "taylorseer:2/0.2, sparse:0.8125, or several joined by +"
            )
        read = options[name].reader
        values[name] = value if read is None else read(value)
    return SkipOptions(**values)

"""Step caching and sparse attention as the command line has them. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wan_core.config import (
    EXACT,
    SPEEDS,
    OptionError,
    SkipOptions,
    TaylorSeerOptions,
)
from wan_core.config.table import from_values, option, parse_slashes
from wan_core.sampling.cache.magcache import parse_magcache
from wan_core.sampling.sparsity.schedule import parse_sparse


@dataclass(frozen=True, kw_only=True)
class SkipArguments:
    """What the command line takes; None is not given, and "" is given, and an error."""

    speed: str = option(
        EXACT,
        choices=SPEEDS,
        help="from 10 steps on careful forecasts 30 %% of the steps, balanced 38, fast 53; below, and with "
        "step-distilled weights: 8-bit attention alone, half of attention's keys, a third. All take 8-bit attention "
        "where --attention is auto (default %(default)s: nothing is left out)",
        tip="exact leaves nothing out. From 10 steps on, careful forecasts 30 % of the steps, balanced 38, fast 53. "
        "Below, and with step-distilled weights, careful leaves nothing out, balanced reads half of attention's keys, "
        "fast a third. All but exact take the card's 8-bit attention where attention is auto.",
        added=True,
    )
    magcache: str | None = option(
        None,
        help="step cache, threshold/skips in a row/retention: 0.12/2/0.2 (published as E012K2R20)",
        metavar="T/K/R",
    )
    taylorseer: str | None = option(
        None,
        help="compute every N-th step, forecast the others; interval/order/retention: 2/1/0.2",
        metavar="N[/ORDER[/R]]",
    )
    sparse: str | None = option(
        None,
        help="block-sparse self-attention: sparsity/share of dense steps such as 0.8125/0; then after colons ramp0.3, "
        "means or a kernel (docs/sparse.md)",
        metavar="S/D",
    )

    def options(self) -> SkipOptions | None:
        """None if nothing is given. Raises OptionError."""
        policies: dict[str, Any] = {"speed": self.speed}
        for name, parse in PARSERS.items():
            if (text := getattr(self, name)) is not None:
                policies[name] = parse(text)
        skipping = SkipOptions(**policies)
        return None if skipping == SkipOptions() else skipping


SEER_FORM = "taylorseer: interval/order/retention such as 2/1/0.2"


PARSERS = {
    "magcache": parse_magcache,
    "taylorseer": lambda text: parse_slashes(TaylorSeerOptions, text, SEER_FORM),
    "sparse": parse_sparse,
}


def skip_options(values: Mapping[str, Any]) -> SkipOptions | None:
    """What those of `values` say that `SkipArguments` has. Raises OptionError."""
    return from_values(SkipArguments, values).options()


def parse_setting(text: str) -> SkipOptions | None:
    """A setting of the command `quality`: parts joined by `+`. Raises OptionError.

    The parts are `magcache:0.12/2/0.2`, `taylorseer:2/1/0.2` and `sparse:0.8125/0:ramp0`; `full` is
    the run without any of them, `speed:balanced` a word of `speed`.
    """
    if text == "full":
        return None
    values: dict[str, Any] = {}
    for part in text.split("+"):
        name, _, value = part.partition(":")
        if not value or name in values or name not in ("speed", *PARSERS):
            raise _unknown(text)
        values[name] = value
    return skip_options(values)


def _unknown(text: str) -> OptionError:
    return OptionError(
        f"setting {text!r} is not known, or repeats a part; write speed:balanced, magcache:0.12/2/0.2, "
        "taylorseer:2/1/0.2, sparse:0.8125/0, or several joined by +"
    )

"""Step caching and sparse attention in their short forms: as the command line has them, and as the settings of presets.
Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from wan_core.config import (
    MAGCACHE_RULES,
    OptionError,
    SkipOptions,
    TaylorSeerOptions,
)
from wan_core.config.checks import check_choice
from wan_core.config.table import from_values, number, option, parse_slashes
from wan_core.sampling.cache.magcache import PRESETS, parse_magcache
from wan_core.sampling.sparsity.schedule import PRESETS as SPARSE_PRESETS
from wan_core.sampling.sparsity.schedule import parse_sparse

SPEEDS = {  # presets, as settings. docs/quality.md has what they keep of the video
    "careful": "magcache:balanced",
    "balanced": "magcache:balanced+sparse:0.6875/0",
    "fast": "magcache:fast+sparse:0.6875/0",
}


@dataclass(frozen=True, kw_only=True)
class SkipArguments:
    """What the command line takes; None is not given, and "" is given, and an error."""

    speed: str | None = option(
        None,
        choices=tuple(SPEEDS),
        help="a whole preset of step caching and sparse attention",
    )
    magcache: str | None = option(
        None,
        help=f"{', '.join(PRESETS)}, or threshold/skips in a row/retention: 0.12/2/0.2 (published as E012K2R20)",
        metavar="T/K/R",
    )
    magcache_rule: str | None = option(
        None,
        choices=MAGCACHE_RULES,
        help="joint: one decision for both guidance branches (default); published: one for each, as in the paper",
    )
    magcache_order: float | None = option(
        None, choices=(0, 1, 1.5, 2), help="order of the forecast; 0 reuses the last residual", parse=number
    )
    taylorseer: str | None = option(
        None,
        help="compute every N-th step, forecast the others; interval/order/retention: 2/1/0.2",
        metavar="N[/ORDER[/R]]",
    )
    sparse: str | None = option(
        None,
        help=f"block-sparse self-attention: {', '.join(SPARSE_PRESETS)}, "
        "or sparsity/share of dense steps such as 0.8125/0; then after colons ramp0.3, means or a kernel "
        "(docs/sparse.md)",
        metavar="S/D",
    )

    def options(self) -> SkipOptions | None:
        """None if nothing is given. Raises OptionError."""
        order, rule = self.magcache_order, self.magcache_rule
        if self.magcache is None and (order is not None or rule is not None):
            raise OptionError("--magcache-rule and --magcache-order need --magcache: give it too, or omit them")
        if self.speed is not None:
            others = [one.name for one in fields(self) if one.name != "speed" and getattr(self, one.name) is not None]
            if others:
                other = others[0].replace("_", "-")
                raise OptionError(f"--speed and --{other} given, which the preset sets too: leave one of them out")
            return speed_options(self.speed)
        policies: dict[str, Any] = {}
        if self.magcache is not None:
            policies["magcache"] = parse_magcache(self.magcache, rule=rule or "joint", order=order)
        for name, parse in PARSERS.items():
            if (text := getattr(self, name)) is not None:
                policies[name] = parse(text)
        skipping = SkipOptions(**policies)
        return None if skipping == SkipOptions() else skipping


SEER_FORM = "taylorseer: interval/order/retention such as 2/1/0.2"


PARSERS = {
    "taylorseer": lambda text: parse_slashes(TaylorSeerOptions, text, SEER_FORM),
    "sparse": parse_sparse,
}


def skip_options(values: Mapping[str, Any]) -> SkipOptions | None:
    """What those of `values` say that `SkipArguments` has. Raises OptionError."""
    return from_values(SkipArguments, values).options()


def speed_options(name: str) -> SkipOptions:
    """What the speed preset `name` sets. Raises OptionError."""
    check_choice("speed preset", name, tuple(SPEEDS))
    options = parse_setting(SPEEDS[name])
    assert options is not None
    return options


def parse_setting(text: str) -> SkipOptions | None:
    """A setting of the command `quality`: parts joined by `+`. Raises OptionError.

    The parts are `magcache:balanced`, `magcache:0.12/2/0.2:order1:published`, `taylorseer:2/1/0.2`,
    and `sparse:balanced:ramp0`; `full` is the run without any of them, `speed:balanced` a speed
    preset.
    """
    if text == "full":
        return None
    values: dict[str, Any] = {}
    for part in text.split("+"):
        name, _, value = part.partition(":")
        if name == "magcache" and value:
            value, *settings = value.split(":")
            for word in settings:
                rule = word in MAGCACHE_RULES
                field = "magcache_rule" if rule else "magcache_order"
                if field in values or not (rule or word in ("order0", "order1", "order1.5", "order2")):
                    raise _unknown(text)
                values[field] = word if rule else number(word.removeprefix("order"))
        if not value or name in values or name not in ("magcache", "speed", *PARSERS):
            raise _unknown(text)
        values[name] = value
    return skip_options(values)


def _unknown(text: str) -> OptionError:
    return OptionError(
        f"setting {text!r} is not known, or repeats a part; write magcache:balanced, magcache:0.12/2/0.2:order1, "
        "taylorseer:2/1/0.2, sparse:balanced, or several joined by +"
    )

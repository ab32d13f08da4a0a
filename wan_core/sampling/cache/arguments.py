"""Command-line options for step caching, guidance schedule and sparse attention, without torch.

Every command that makes a plan has them.
"""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from typing import Any, TypeVar

from wan_core.config import (
    MAGCACHE_RULES,
    AdaptiveOptions,
    GuidanceOptions,
    OptionError,
    SkipOptions,
    TaylorSeerOptions,
)
from wan_core.sampling.cache.magcache import PRESETS, parse_magcache
from wan_core.sampling.cache.policies import number, parse_pattern
from wan_core.sampling.sparsity.schedule import PRESETS as SPARSE_PRESETS
from wan_core.sampling.sparsity.schedule import parse_sparse
from wan_core.sampling.speed_presets import SUFFIX, find_speed, speed_names
from wan_core.sampling.stages import parse_stages

Cache = TypeVar("Cache", TaylorSeerOptions, AdaptiveOptions)
SEER_FORM = "interval/order/retention such as 2/1/0.2"
PARTS = (
    "magcache", "magcache_rule", "magcache_order", "taylorseer", "adaptive", "pattern", "guidance_interval",
    "guidance_every", "sparse", "stages",
)  # fmt: skip
ADAPTIVE_FORM = "threshold/skips in a row/retention such as 0.1/3/0.2"


def add_skip_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("step caching, guidance schedule, sparse attention (default: off)")
    group.add_argument(
        "--speed",
        metavar="NAME",
        help="a whole preset, for which a search measured seconds and quality: "
        f"{', '.join(speed_names())}, or a file {SUFFIX} of the command search",
    )
    group.add_argument(
        "--magcache",
        metavar="T/K/R",
        help=f"{', '.join(PRESETS)}, or threshold/skips in a row/retention: 0.12/2/0.2 (published as E012K2R20)",
    )
    group.add_argument(
        "--magcache-rule",
        choices=MAGCACHE_RULES,
        help="joint: one decision for both guidance branches (default); published: one for each, as in the paper",
    )
    group.add_argument(
        "--magcache-order",
        type=number,
        choices=(0, 1, 1.5, 2),
        help="order of the forecast; 0 reuses the last residual",
    )
    group.add_argument(
        "--taylorseer",
        metavar="N[/ORDER[/R]]",
        help="compute every N-th step, forecast the others; interval/order/retention: 2/1/0.2",
    )
    group.add_argument(
        "--adaptive",
        metavar="T[/K[/R]]",
        help="decide during the run which steps to skip; threshold/skips in a row/retention: 0.1/3/0.2",
    )
    group.add_argument(
        "--pattern",
        metavar="HIGH/LOW[/ORDER]",
        help="marks of each expert's steps, 1 computed, 0 forecast, for any number of steps: 1101010/1101/1.5",
    )
    group.add_argument("--guidance-interval", metavar="LOW-HIGH", help="guide only steps with sigma between: 0.2-0.95")
    group.add_argument(
        "--guidance-every", type=int, metavar="N", help="run the unconditional branch only at every N-th guided step"
    )
    group.add_argument(
        "--sparse",
        metavar="S/D/L",
        help=f"block-sparse self-attention: {', '.join(SPARSE_PRESETS)}, or sparsity/share of dense steps/dense layers "
        "such as 0.8125/0/0; then options after colons: ramp0.3, mass0.9, reuse2, parts4, slope, error, even, alone, "
        "mean or a kernel (docs/sparse.md)",
    )
    group.add_argument(
        "--stages",
        metavar="S/LOW-HIGH",
        help="run the steps with sigma between at a part of width and height: 0.5/0.9-0.98, several joined by commas "
        "(docs/performance.md)",
    )


def skip_options(options: argparse.Namespace) -> SkipOptions | None:
    """The options of `add_skip_options` as SkipOptions; None if none is given. Raises OptionError."""
    order, rule = options.magcache_order, options.magcache_rule
    if options.magcache is None and (order is not None or rule is not None):
        raise OptionError("--magcache-rule and --magcache-order need --magcache: give it too, or omit them")
    guidance = None
    if options.guidance_interval is not None or options.guidance_every is not None:
        low, high = _interval("0-1" if options.guidance_interval is None else options.guidance_interval)
        every = 1 if options.guidance_every is None else options.guidance_every
        guidance = GuidanceOptions(low=low, high=high, every=every)
    magcache, seer, adaptive = options.magcache, options.taylorseer, options.adaptive  # "" is given, and an error
    if options.speed is not None:
        others = [name for name in PARTS if getattr(options, name) is not None]
        if others:
            raise OptionError(
                f"--speed and --{others[0].replace('_', '-')} given, which the preset sets too: leave one of them out"
            )
        return speed_options(options.speed)
    skipping = SkipOptions(
        magcache=None if magcache is None else parse_magcache(magcache, rule=rule or "joint", order=order),
        taylorseer=None if seer is None else _parse(seer, TaylorSeerOptions, "taylorseer", SEER_FORM),
        adaptive=None if adaptive is None else _parse(adaptive, AdaptiveOptions, "adaptive", ADAPTIVE_FORM),
        guidance=guidance,
        pattern=None if options.pattern is None else parse_pattern(options.pattern),
        sparse=None if options.sparse is None else parse_sparse(options.sparse),
        stages=() if options.stages is None else parse_stages(options.stages),
    )
    return None if skipping == SkipOptions() else skipping


def speed_options(name: str) -> SkipOptions | None:
    """What the speed preset `name` sets; a name or a file as for `find_speed`. Raises OptionError."""
    preset = find_speed(name)
    try:
        if "speed:" in preset.setting:
            raise OptionError("a preset within a preset")
        options = parse_setting(preset.setting)
        return None if options is None else replace(options, measured_steps=preset.steps)
    except OptionError as fault:
        raise OptionError(f"speed preset {name}: {fault}") from fault


def _parse(text: str, kind: type[Cache], name: str, form: str) -> Cache:
    """The fields of `kind` in their order, between slashes; the last ones may be missing. Raises OptionError."""
    parts, known = text.split("/"), fields(kind)
    try:
        if len(parts) > len(known):
            raise ValueError(text)
        pairs = zip(known, parts)  # noqa: B905
        given: dict[str, Any] = {f.name: (int if f.type == "int" else number)(part) for f, part in pairs}
        return kind(**given)
    except OptionError:
        raise
    except ValueError as fault:
        raise OptionError(f"{name} {text!r} given; write {form}") from fault


def parse_setting(text: str) -> SkipOptions | None:
    """A setting of the command `quality`: parts joined by `+`. Raises OptionError.

    The parts are `magcache:balanced`, `magcache:0.12/2/0.2:order1:published`, `taylorseer:2/1/0.2`, `adaptive:0.1`,
    `pattern:1101/101/1.5`, `guidance:0.2-0.9`, `every:2`, `sparse:balanced:reuse2` and `stages:0.5/0.9-0.98`; `full` is
    the run without any of them, `speed:balanced` a speed preset.
    """
    if text == "full":
        return None
    parser = argparse.ArgumentParser()
    add_skip_options(parser)
    options = parser.parse_args([])
    names: list[str] = []
    for part in text.split("+"):
        name, _, value = part.partition(":")
        names.append(name)
        if not value:
            raise _unknown(text)
        if name == "magcache":
            options.magcache, *words = value.split(":")
            for word in words:
                if word in MAGCACHE_RULES and options.magcache_rule is None:
                    options.magcache_rule = word
                elif word in ("order0", "order1", "order1.5", "order2") and options.magcache_order is None:
                    options.magcache_order = number(word.removeprefix("order"))
                else:
                    raise _unknown(text)
        elif name in ("taylorseer", "adaptive", "pattern", "sparse", "stages", "speed"):
            setattr(options, name, value)
        elif name == "guidance":
            options.guidance_interval = value
        elif name == "every" and value.isdecimal():
            options.guidance_every = int(value)
        else:
            raise _unknown(text)
    if len(set(names)) < len(names):
        raise _unknown(text)
    return skip_options(options)


def _unknown(text: str) -> OptionError:
    return OptionError(
        f"setting {text!r} is not known, or repeats a part; write magcache:balanced, magcache:0.12/2/0.2:order1, "
        "taylorseer:2/1/0.2, adaptive:0.1, guidance:0.2-0.9, every:2, sparse:balanced, stages:0.5/0.9-0.98, or several "
        "joined by +"
    )


def _interval(text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    try:
        return float(low), float(high)
    except ValueError:
        raise OptionError(f"guidance interval {text!r} given; write two sigmas from 0 to 1: 0.2-0.95") from None

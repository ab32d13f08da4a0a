"""Command-line options for leaving forwards out, the same in every command that makes a plan. Knows no torch."""

from __future__ import annotations

import argparse

from wan_core.config import (
    MAGCACHE_RULES,
    AdaptiveOptions,
    GuidanceOptions,
    OptionError,
    SkipOptions,
    TaylorSeerOptions,
)
from wan_core.sampling.cache.magcache import PRESETS, parse_magcache
from wan_core.sampling.sparsity.schedule import PRESETS as SPARSE_PRESETS
from wan_core.sampling.sparsity.schedule import parse_sparse


def add_skip_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("leaving forwards out (default: every one runs)")
    group.add_argument(
        "--magcache",
        metavar="T/K/R",
        help=f"{', '.join(PRESETS)}, or threshold/skips in a row/retention: 0.12/2/0.2 (published as E012K2R20)",
    )
    group.add_argument(
        "--magcache-rule",
        choices=MAGCACHE_RULES,
        help="both guidance branches decide together (joint, default), or each for itself as in the publication",
    )
    group.add_argument(
        "--magcache-order", type=int, choices=(0, 1, 2), help="forecast the residual instead of reusing the last (0)"
    )
    group.add_argument(
        "--taylorseer",
        metavar="N[/ORDER[/R]]",
        help="compute every N-th step, forecast between: 2/1/0.2 (interval/order/retention)",
    )
    group.add_argument(
        "--adaptive",
        metavar="T[/K[/R]]",
        help="decide while running; threshold/skips in a row/retention: 0.1/3/0.2",
    )
    group.add_argument("--guidance-interval", metavar="LOW-HIGH", help="guide only where sigma lies between: 0.2-0.95")
    group.add_argument(
        "--guidance-every", type=int, metavar="N", help="run the unconditional branch at every N-th guided step only"
    )
    group.add_argument(
        "--sparse",
        metavar="S/D/L",
        help=f"self-attention over a part of the keys: {', '.join(SPARSE_PRESETS)}, or sparsity/share of dense steps/"
        "dense layers: 0.8125/0/0; after a colon ramp0.3, mass0.9, reuse2, even, alone, mean or a kernel "
        "(docs/sparse.md)",
    )


def skip_options(options: argparse.Namespace) -> SkipOptions | None:
    """What `add_skip_options` was given; None for nothing. Raises OptionError."""
    order, rule = options.magcache_order, options.magcache_rule
    if options.magcache is None and (order is not None or rule is not None):
        raise OptionError("--magcache-rule and --magcache-order belong to --magcache: give that too, or leave them out")
    guidance = None
    if options.guidance_interval is not None or options.guidance_every is not None:
        low, high = _interval("0-1" if options.guidance_interval is None else options.guidance_interval)
        every = 1 if options.guidance_every is None else options.guidance_every
        guidance = GuidanceOptions(low=low, high=high, every=every)
    magcache, seer, adaptive = options.magcache, options.taylorseer, options.adaptive  # "" was given, and is refused
    found = SkipOptions(
        magcache=None if magcache is None else parse_magcache(magcache, rule=rule or "joint", order=order),
        taylorseer=None if seer is None else parse_taylorseer(seer),
        adaptive=None if adaptive is None else parse_adaptive(adaptive),
        guidance=guidance,
        sparse=None if options.sparse is None else parse_sparse(options.sparse),
    )
    return None if found == SkipOptions() else found


def parse_taylorseer(text: str) -> TaylorSeerOptions:
    """`interval[/order[/retention]]`. Raises OptionError."""
    try:
        interval, order, retention = _padded(text, ("", "1", "0.2"))
        return TaylorSeerOptions(interval=int(interval), order=int(order), retention=float(retention))
    except ValueError as fault:
        raise _refused(fault, "taylorseer", text, "interval/order/retention such as 2/1/0.2") from fault


def parse_adaptive(text: str) -> AdaptiveOptions:
    """`threshold[/skips in a row[/retention]]`. Raises OptionError."""
    try:
        threshold, skips, retention = _padded(text, ("", "3", "0.2"))
        return AdaptiveOptions(threshold=float(threshold), max_skips=int(skips), retention=float(retention))
    except ValueError as fault:
        raise _refused(fault, "adaptive", text, "threshold/skips in a row/retention such as 0.1/3/0.2") from fault


def parse_setting(text: str) -> SkipOptions | None:
    """Options in one word, joined by `+`, as the quality harness takes them: `magcache:balanced`,
    `magcache:0.12/2/0.2:order1:published`, `taylorseer:2/1/0.2`, `adaptive:0.1`, `guidance:0.2-0.9`, `every:2`,
    `sparse:balanced:reuse2`; `full` leaves nothing out. Raises OptionError."""
    if text == "full":
        return None
    parser = argparse.ArgumentParser()
    add_skip_options(parser)
    given = parser.parse_args([])
    names: list[str] = []
    for part in text.split("+"):
        name, _, value = part.partition(":")
        names.append(name)
        if not value:
            raise _unknown(text)
        if name == "magcache":
            given.magcache, *more = value.split(":")
            for word in more:
                if word in MAGCACHE_RULES and given.magcache_rule is None:
                    given.magcache_rule = word
                elif word in ("order0", "order1", "order2") and given.magcache_order is None:
                    given.magcache_order = int(word[-1])
                else:
                    raise _unknown(text)
        elif name in ("taylorseer", "adaptive", "sparse"):
            setattr(given, name, value)
        elif name == "guidance":
            given.guidance_interval = value
        elif name == "every" and value.isdecimal():
            given.guidance_every = int(value)
        else:
            raise _unknown(text)
    if len(set(names)) < len(names):
        raise _unknown(text)
    return skip_options(given)


def _unknown(text: str) -> OptionError:
    return OptionError(
        f"setting {text!r} is not known, or says one thing twice; write magcache:balanced, magcache:0.12/2/0.2:order1, "
        "taylorseer:2/1/0.2, adaptive:0.1, guidance:0.2-0.9, every:2, sparse:balanced, or several joined by +"
    )


def _interval(text: str) -> tuple[float, float]:
    low, _, high = text.partition("-")
    try:
        return float(low), float(high)
    except ValueError:
        raise OptionError(f"guidance interval {text!r} given; write two shares of the noise: 0.2-0.95") from None


def _padded(text: str, default: tuple[str, str, str]) -> list[str]:
    given = text.split("/")
    if len(given) > len(default):
        raise ValueError(text)
    return [*given, *default[len(given) :]]


def _refused(fault: ValueError, name: str, text: str, form: str) -> OptionError:
    return fault if isinstance(fault, OptionError) else OptionError(f"{name} {text!r} given; write {form}")

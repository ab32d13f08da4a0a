"""The commands that measure what leaving forwards out does: calibrate and quality."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from wan_core.cli.options import plan_numbers, size
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.pipeline.evaluate.options import SETTINGS
from wan_core.sampling.cache.arguments import skip_options


def run_calibrate(options: argparse.Namespace) -> int:
    from wan_core.pipeline.evaluate.run import run_calibrate

    return run_calibrate(options, *_pipeline(options))


def run_quality(options: argparse.Namespace) -> int:
    from wan_core.pipeline.evaluate.run import run_quality

    pipe, base = _pipeline(options)
    return run_quality(options, pipe, base, options.setting or SETTINGS)


def _pipeline(options: argparse.Namespace) -> tuple[Any, Request]:
    """The models, and the request that every sample follows but for its caption and seed."""
    from wan_core.pipeline.pipeline import Pipeline

    if skip_options(options) is not None:
        raise OptionError(f"{options.command} runs in full by itself: leave out --magcache and its like")
    given = vars(options)
    width, height = size(options.size) if options.size else (None, None)
    wanted = {f.name: given[f.name] for f in fields(Request) if f.name in given} | plan_numbers(options)
    request = Request(**{**wanted, "prompt": "", "width": width, "height": height})
    loaded = LoadOptions(**{f.name: given[f.name] for f in fields(LoadOptions)})
    # An image picks the embedded model's image variant. Without one there may be no job yet: the samples bring theirs.
    return Pipeline.load(loaded, request=request if request.image else None), request

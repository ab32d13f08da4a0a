"""The commands calibrate and quality, which measure the effect of step caching and sparse attention."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from wan_core.cli.generate import load_options_of
from wan_core.cli.options import plan_numbers, size
from wan_core.config import OptionError, Request
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
    """The loaded models, and the request that all samples share except for caption and seed. Raises OptionError."""
    from wan_core.pipeline.pipeline import Pipeline

    if skip_options(options) is not None:
        raise OptionError(
            f"{options.command} measures the full run: omit options for step caching, guidance schedule and sparsity"
        )
    arguments = vars(options)
    width, height = size(options.size) if options.size else (None, None)
    settings = {f.name: arguments[f.name] for f in fields(Request) if f.name in arguments} | plan_numbers(options)
    request = Request(**{**settings, "prompt": "", "width": width, "height": height})
    # Loading needs the request only to select the embedded model's image-to-video variant.
    return Pipeline.load(load_options_of(options), request=request if request.image else None), request

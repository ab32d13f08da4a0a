"""The commands calibrate, quality and search, which measure the effect of step caching and sparse attention."""

from __future__ import annotations

import argparse
from typing import Any

from wan_core.cli.generate import load_options_of
from wan_core.cli.options import outputs_of, values_of
from wan_core.config import OptionError, Request
from wan_core.config.checks import parse_size
from wan_core.config.outputs import Outputs
from wan_core.config.table import from_values
from wan_core.sampling.cache.arguments import skip_options
from wan_lab.options import SETTINGS


def run_calibrate(options: argparse.Namespace) -> int:
    from wan_lab.run import run_calibrate

    with outputs_of(options) as outputs:
        if options.out is not None and not options.sparsity:
            options.out = outputs.add("--out", options.out)
        _claim_pictures(options, outputs)
        return run_calibrate(options, *_pipeline(options), outputs)


def run_quality(options: argparse.Namespace) -> int:
    from wan_core.media.mp4 import check_video_name
    from wan_lab.run import run_quality

    with outputs_of(options) as outputs:
        _claim_pictures(options, outputs)
        if options.video is not None:
            check_video_name(options.video)
            options.video = outputs.add("--video", options.video)
        return run_quality(options, *_pipeline(options), options.setting or SETTINGS, outputs)


def run_search(options: argparse.Namespace) -> int:
    from wan_lab.search_run import run_search

    with outputs_of(options) as outputs:
        return run_search(options, _pipeline, outputs)


def _claim_pictures(options: argparse.Namespace, outputs: Outputs) -> None:
    """Check and claim what `--plot` names. Raises OptionError."""
    from wan_core.media.pictures import check_picture_name

    if options.plot is not None:
        check_picture_name(options.plot)
        options.plot = outputs.add("--plot", options.plot)


def _pipeline(options: argparse.Namespace) -> tuple[Any, Request]:
    """The loaded models, and the request that all samples share except for caption and seed. Raises OptionError."""
    from wan_core.pipeline.pipeline import Pipeline

    if skip_options(vars(options)) is not None:
        raise OptionError(
            f"{options.command} measures the full run: omit options for step caching, guidance schedule and sparsity"
        )
    width, height = parse_size(options.size) if options.size else (None, None)
    request = from_values(Request, values_of(options), prompt="", width=width, height=height)
    # Loading needs the request only to select the embedded model's image-to-video variant.
    return Pipeline.load(load_options_of(options), request=request if request.image else None), request

"""The commands calibrate, quality and report-card, which measure the effect of step caching and sparse attention."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from wan_core.cli.generate import load_options_of, watching
from wan_core.cli.options import (
    add_model_options,
    add_overwrite_option,
    add_plan_options,
    outputs_of,
    skip_of,
    values_of,
)
from wan_core.cli.parsing import add_options
from wan_core.cli.progress import ProgressLine
from wan_core.config import OptionError, Request
from wan_core.config.table import from_values

# The default settings of `quality`: the words of speed, MagCache as published, TaylorSeer, half of the keys.
SETTINGS = (
    "speed:careful",
    "speed:balanced",
    "speed:fast",
    "magcache:0.12/2/0.2",
    "taylorseer:3/0.3",
    "sparse:0.5",
)


def add_calibrate_options(parser: argparse.ArgumentParser) -> None:
    _add_shared_options(parser, count=4)
    parser.add_argument("--out", type=Path, help="file of the curve (default: beside the checkpoint, where it is used)")
    add_overwrite_option(parser)


def add_quality_options(parser: argparse.ArgumentParser) -> None:
    _add_shared_options(parser, count=8)
    parser.add_argument(
        "--setting",
        action="append",
        help="a setting to compare with the full run, repeatable: speed:balanced, magcache:0.12/2/0.2, "
        "taylorseer:2/0.2, sparse:0.8125, several joined by + "
        "(default: one of each kind)",
    )
    parser.add_argument("--out", type=Path, help="JSON file, or a folder for a file named after device and date")
    parser.add_argument("--plot", type=Path, help="quality over time, with the Pareto front (.png)")
    parser.add_argument("--video", type=Path, help="the first sample in every setting, side by side (.mp4)")
    add_overwrite_option(parser)


def add_card_options(parser: argparse.ArgumentParser) -> None:
    _add_shared_options(parser, count=3, size="832x480; of the embedded model its own", batch=False)
    parser.add_argument(
        "--out", type=Path, default=Path("."), help="folder for report-card.md, .png and .json (default: this one)"
    )
    parser.add_argument("--with-prompts", action="store_true", help="write the prompts into the card (default: none)")
    add_overwrite_option(parser)


def _add_shared_options(
    parser: argparse.ArgumentParser, count: int, size: str = "the task's own", batch: bool = True
) -> None:
    add_model_options(parser)
    add_plan_options(parser)
    group = parser.add_argument_group("sample videos")
    group.add_argument(
        "--prompt", action="append", dest="prompts", help="repeatable (default: captions suitable for the model)"
    )
    group.add_argument(
        "--samples",
        type=Path,
        metavar="FILE.jsonl",
        help='prompts with a first frame each, {"prompt": ..., "image": ...} a line, used in turn',
    )
    group.add_argument("--negative-prompt", help="default: the task's own, as of `generate`")
    group.add_argument("--image", help="first frame, for models that take one")
    add_options(group, Request, ["width", "frames"], width={"help": f"WIDTHxHEIGHT (default: {size})"})
    group.add_argument("--count", type=int, default=count, help="number of videos (default %(default)s)")
    group.add_argument("--seed", type=int, default=0, help="of the first video; it increases by 1 for each video")
    if batch:
        help = "videos per batch, for small models (default %(default)s)"
        group.add_argument("--batch", type=int, default=1, help=help)
    else:
        parser.set_defaults(batch=1)


def run_calibrate(options: argparse.Namespace) -> int:
    from wan_lab.run import run_calibrate

    with outputs_of(options) as outputs:
        if options.out is not None:
            options.out = outputs.add("--out", options.out, sealed=True)
        return run_calibrate(options, *_pipeline(options), outputs)


def run_quality(options: argparse.Namespace) -> int:
    from wan_core.media.mp4 import check_video_name
    from wan_core.media.pictures import check_picture_name
    from wan_lab.run import run_quality

    with outputs_of(options) as outputs:
        if options.plot is not None:
            check_picture_name(options.plot)
            options.plot = outputs.add("--plot", options.plot)
        if options.video is not None:
            check_video_name(options.video)
            options.video = outputs.add("--video", options.video)
        return run_quality(options, *_pipeline(options), options.setting or SETTINGS, outputs)


def run_card(options: argparse.Namespace) -> int:
    from wan_lab.card import run_card

    with outputs_of(options) as outputs:
        return run_card(options, load_options_of(options), _request(options), outputs, watching(ProgressLine()))


def _pipeline(options: argparse.Namespace) -> tuple[Any, Request]:
    """The loaded models, and the request that all samples share except for caption and seed. Raises OptionError."""
    from wan_core.pipeline.pipeline import Pipeline

    request = _request(options)
    # Loading needs the request only to select the embedded model's image-to-video variant.
    return Pipeline.load(load_options_of(options), request=request if request.image else None), request


def _request(options: argparse.Namespace) -> Request:
    """What all samples share except for caption and seed. Raises OptionError."""
    if skip_of(options) is not None:
        raise OptionError(f"{options.command} measures the full run: omit options for step caching and sparsity")
    return from_values(Request, values_of(options), prompt="")

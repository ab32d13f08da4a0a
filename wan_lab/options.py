"""The command-line options of `calibrate` and `quality`. Does not import torch, so that `--help` is fast."""

from __future__ import annotations

import argparse
from pathlib import Path

# The default settings of `quality`: the presets, MagCache as published, the other policies, and combinations.
SETTINGS = (
    "magcache:quality",
    "magcache:balanced",
    "magcache:fast",
    "magcache:balanced:order0",
    "magcache:balanced:order1",
    "magcache:fast:order1",
    "magcache:0.12/2/0.2",
    "magcache:0.24/2/0.1",
    "magcache:0.12/2/0.2:published",
    "taylorseer:2/1/0.1",
    "taylorseer:3/2",
    "every:2",
    "guidance:0.3-1",
    "magcache:fast+every:2",
    "adaptive:0.1",
    "sparse:quality",
    "sparse:balanced",
    "sparse:fast",
    "magcache:balanced+sparse:balanced",
)


def add_calibrate_options(parser: argparse.ArgumentParser) -> None:
    _add_sample_options(parser, count=4)
    parser.add_argument("--out", type=Path, help="file of the curve (default: beside the checkpoint, where it is used)")
    parser.add_argument("--plot", type=Path, help="also draw it, with the steps that each preset would skip (.png)")
    parser.add_argument(
        "--sparsity",
        action="store_true",
        help="instead of the MagCache curve, measure the attention that selected blocks cover, by layer and head; "
        "--out: a folder or a name",
    )


def add_quality_options(parser: argparse.ArgumentParser) -> None:
    _add_sample_options(parser, count=8)
    parser.add_argument(
        "--setting",
        action="append",
        help="a setting to compare with the full run, repeatable: magcache:balanced, magcache:0.12/2/0.2:order1, "
        "taylorseer:2/1/0.2, adaptive:0.1, guidance:0.3-1, every:2, sparse:balanced, several joined by + "
        "(default: one of each kind)",
    )
    parser.add_argument("--out", type=Path, help="JSON file, or a folder for a file named after device and date")
    parser.add_argument("--plot", type=Path, help="quality over time, with the Pareto front (.png)")
    parser.add_argument("--video", type=Path, help="the first sample in every setting, side by side (.mp4)")


def add_search_options(parser: argparse.ArgumentParser) -> None:
    _add_sample_options(parser, count=48)
    group = parser.add_argument_group("what is searched")
    group.add_argument(
        "--seconds",
        action="append",
        metavar="NAME=SECONDS",
        help="a preset with the most quality in so many seconds, repeatable: balanced=100",
    )
    group.add_argument(
        "--psnr",
        action="append",
        metavar="NAME=DECIBELS",
        help="the fastest preset that keeps so many decibels to the full run, repeatable: careful=35",
    )
    group.add_argument(
        "--start",
        action="append",
        metavar="PRESET",
        help="also begin with what another search found, repeatable: a preset's name or file",
    )
    group.add_argument("--out", type=Path, required=True, help="folder of the presets, and of rows to go on with")
    group.add_argument(
        "--first", type=int, default=6, metavar="N", help="videos of the first round of halving (default %(default)s)"
    )
    group.add_argument("--rounds", type=int, default=3, help="rounds of changes to the best (default %(default)s)")
    group.add_argument("--changes", type=int, default=8, help="changes tried in a round (default %(default)s)")
    of = parser.add_argument_group(
        "what seconds are estimated for (default: this model at this size on this device; for the embedded model A14B "
        "at 1280x720x81 in FP8 on an H200)"
    )
    of.add_argument("--of-task", help="the task whose full size is estimated")
    of.add_argument("--of-size", metavar="WIDTHxHEIGHTxFRAMES")
    of.add_argument("--forward-seconds", type=float, help="seconds of one dense forward there")
    of.add_argument("--beside-seconds", type=float, help="seconds of everything else there, such as decoding")


def _add_sample_options(parser: argparse.ArgumentParser, count: int) -> None:
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
    group.add_argument("--size", help="WIDTHxHEIGHT (default: the task's own)")
    group.add_argument("--frames", type=int, help="4n + 1")
    group.add_argument("--count", type=int, default=count, help="number of videos (default %(default)s)")
    group.add_argument("--seed", type=int, default=0, help="of the first video; it increases by 1 for each video")
    group.add_argument("--batch", type=int, default=1, help="videos per batch, for small models (default %(default)s)")

"""The option for context windows. Does not import torch."""

from __future__ import annotations

import argparse

from wan_core.config import OptionError, WindowOptions


def add_windows_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--windows",
        type=_windows,
        metavar="LENGTH[/OVERLAP]",
        help="context windows: each forward sees LENGTH frames of a longer video, of which OVERLAP are also its "
        "neighbour's: 81/28; then options after colons: a schedule (standard_uniform, standard_static, looped_uniform, "
        "batched), how windows are fused (pyramid, relative, flat, overlap-linear), plain, retain, closed, nolead "
        "(docs/windows.md)",
    )


def _windows(text: str) -> WindowOptions:
    try:
        return WindowOptions.parse(text)
    except OptionError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from fault

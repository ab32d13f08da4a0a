"""Options of models that follow a control video or the path of a camera (VACE, Fun)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from wan_core.config import ControlOptions, OptionError
from wan_core.config.limits import MAX_JSON
from wan_core.config.options import check_outpaint

FILES = ("control_video",)  # options that name a file that is read


def add_control_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--control-video",
        help="video that is followed (depth, edges, poses: VACE, Fun control), or of which --mask or --outpaint says "
        "what is made anew (VACE)",
    )
    group.add_argument(
        "--outpaint",
        type=outpaint,
        metavar="LEFT/TOP/RIGHT/BOTTOM",
        help="make so many pixels on each side of --control-video (VACE)",
    )
    group.add_argument(
        "--camera",
        type=camera,
        metavar="MOTIONS|FILE",
        help="path of the camera (Fun camera): motions such as zoom-in or pan-left:0.5+tilt-up with their speeds, or a "
        "file of poses, a line a frame as in RealEstate10K",
    )


def add_strength_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--control-scale", type=float, help="how much the control counts (VACE; default 1, as trained)")
    group.add_argument("--control-start", type=float, metavar="SHARE", help="from this share of the run on (default 0)")
    group.add_argument("--control-end", type=float, metavar="SHARE", help="up to this share of the run (default 1)")


def control_of(options: argparse.Namespace) -> ControlOptions | None:
    """None where nothing was said. Raises OptionError."""
    given = {name: getattr(options, f"control_{name}") for name in ("scale", "start", "end")}
    given = {name: value for name, value in given.items() if value is not None}
    return ControlOptions(**given) if given else None


def outpaint(text: str) -> tuple[int, ...]:
    sides = text.split("/")
    try:
        if not all(side.isdecimal() and len(side) <= 5 for side in sides):
            raise OptionError(f"outpaint {text[:40]!r} given; write LEFT/TOP/RIGHT/BOTTOM in pixels, as 120/0/120/0")
        check_outpaint(found := tuple(map(int, sides)))
    except OptionError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from fault
    return found


def camera(text: str) -> str:
    """The text of a file of poses, or motions as they are: what they say is checked with the request."""
    path = Path(text)
    try:
        if not os.path.isfile(text):  # False also for what is no name: poses that were read are a default of lists
            return text
        if path.stat().st_size > MAX_JSON:
            raise argparse.ArgumentTypeError(f"{path} has more than {MAX_JSON} bytes: no file of camera poses")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise argparse.ArgumentTypeError(f"cannot read {path} as camera poses ({fault})") from fault

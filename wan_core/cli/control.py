"""The path of a camera on the command line (Fun)."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from wan_core.config.limits import MAX_JSON


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

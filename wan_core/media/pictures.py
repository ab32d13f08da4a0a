"""Pictures: a canvas for lines, boxes and text, and writing a picture in the format that its name ends in.

Everything on the canvas is drawn at twice its size with Pillow and scaled down, which smooths lines that Pillow
draws jagged.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from wan_core.config import OptionError
from wan_core.config.limits import MAX_SIDE
from wan_core.config.outputs import written_beside

SCALE = 2
PAPER, INK, FAINT, LINE = "#1f2430", "#e6e6e6", "#8a93a6", "#3a4254"
EXPERT_COLOUR: dict[str, str] = {"high": "#f2a65a", "low": "#5aa9e6"}
EXPERT_SHADE: dict[str, str] = {"high": "#3a2f26", "low": "#22303f"}
PHASE_COLOUR = "#7bc47f"


class Canvas:
    """Drawing in final pixels on a picture that is `SCALE` times larger."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.image = Image.new("RGB", (width * SCALE, height * SCALE), PAPER)
        self.draw = ImageDraw.Draw(self.image)

    def box(self, x0: float, y0: float, x1: float, y1: float, fill: str | None, outline: str | None = None) -> None:
        self.draw.rectangle((x0 * SCALE, y0 * SCALE, x1 * SCALE, y1 * SCALE), fill, outline, SCALE)

    def line(self, points: Sequence[tuple[float, float]], fill: str, width: float = 1) -> None:
        self.draw.line([(x * SCALE, y * SCALE) for x, y in points], fill, round(width * SCALE))

    def dot(self, x: float, y: float, radius: float, fill: str | None, outline: str) -> None:
        corners = [(x - radius) * SCALE, (y - radius) * SCALE, (x + radius) * SCALE, (y + radius) * SCALE]
        self.draw.ellipse(corners, fill, outline, SCALE)

    def text(self, x: float, y: float, words: str, fill: str = INK, size: float = 13, anchor: str = "la") -> None:
        self.draw.text((x * SCALE, y * SCALE), words, fill, ImageFont.load_default(size * SCALE), anchor)

    def finish(self) -> Image.Image:
        return self.image.resize((self.width, self.height), Image.Resampling.LANCZOS)


def clock(seconds: float) -> str:
    """`4.2 s`, `3:07 min`, `1:02:45 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def check_picture_name(path: str | os.PathLike[str]) -> None:
    """Raise OptionError now if `save_picture` knows no format for this name: before hours of work, not after."""
    picture_format(path)


def picture_format(path: str | os.PathLike[str]) -> str:
    """Pillow's name of the format that the ending of `path` names. Raises OptionError."""
    format_name = Image.registered_extensions().get(Path(path).suffix.lower(), "")
    try:
        Image.new("RGB", (8, 8)).save(io.BytesIO(), format=format_name)
    except (OSError, ValueError, KeyError) as fault:
        raise OptionError(
            f"cannot write the picture {path}: no format for coloured pictures has this ending; use .png"
        ) from fault
    return format_name


def save_picture(image: Image.Image, path: str | os.PathLike[str]) -> Path:
    """Write `image`, beside and then renamed. Raises OptionError for a name without a format, and OSError."""
    kind = picture_format(path)
    with written_beside(path) as temporary:
        image.save(temporary, format=kind)
    return Path(path)


COLUMNS, GAP = 6, 4  # frames of a sheet, and pixels between them


def write_sheet(path: str | os.PathLike[str], frames: NDArray[np.uint8]) -> Path:
    """Frames from the first to the last side by side, as one picture.

    frames: uint8 [F, H, W, 3]; `COLUMNS` of them are shown, evenly spaced, or as many as a picture has room for
    (`MAX_SIDE`). Small ones are doubled. Raises as `save_picture` does.
    """
    height, width = frames.shape[1:3]
    scale = 2 if height < 192 and 2 * width <= MAX_SIDE else 1
    room = max(1, (MAX_SIDE + GAP) // (scale * width + GAP))
    chosen = frames[np.linspace(0, len(frames) - 1, min(COLUMNS, room, len(frames))).round().astype(int)]
    chosen = chosen.repeat(scale, axis=1).repeat(scale, axis=2)
    padded = np.pad(chosen, ((0, 0), (0, 0), (0, GAP), (0, 0)), constant_values=255)
    return save_picture(Image.fromarray(np.concatenate(list(padded), axis=1)[:, :-GAP]), path)

"""Pictures: a canvas for lines, boxes and text, and writing one as PNG.

Everything on the canvas is drawn at twice its size with Pillow and scaled down, which smooths lines that Pillow
draws jagged.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from wan_core.config import OptionError
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
    """Raise OptionError now if `save_picture` cannot write a file of this name: before hours of work, not after."""
    if Path(path).suffix.lower() != ".png":
        raise OptionError(f"cannot write the picture {path}: give it a name that ends in .png")


def save_picture(image: Image.Image, path: str | os.PathLike[str]) -> Path:
    """Write `image` as PNG, beside and then renamed. Raises OptionError for another ending, and OSError."""
    check_picture_name(path)
    with written_beside(path) as temporary:
        image.save(temporary, format="PNG")
    return Path(path)

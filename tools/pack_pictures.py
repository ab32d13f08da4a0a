"""Draw the icon and the banner by which ComfyUI's registry shows this pack.

    python -m tools.pack_pictures [FOLDER]    write icon.png and banner.png (docs/images)

Both show a run: a bar for each step, filled where it is computed, an outline where it is skipped, under the falling
curve of the noise.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
ICON, BANNER = (400, 400), (1260, 540)  # pixels; the registry takes at most 400x400, and 21:9
FINE = 4  # drawn this many times larger, then scaled down
GROUND, BLUE, AMBER, PALE, WHITE = "#101828", "#7c9cff", "#ffb454", "#5b6c92", "#ffffff"
STEPS = "xxxx.x.x.x.xx"  # x: computed
SHIFT = 3.0

Box = tuple[float, float, float, float]


def drawn(size: tuple[int, int], radius: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGBA", (size[0] * FINE, size[1] * FINE), (0, 0, 0, 0))
    pen = ImageDraw.Draw(image)
    pen.rounded_rectangle((0, 0, image.width - 1, image.height - 1), radius * FINE, fill=GROUND)
    return image, pen


def draw_steps(pen: ImageDraw.ImageDraw, box: Box, steps: str) -> None:
    """The bars of the steps, and the curve of the noise over them."""
    left, top, right, bottom = (side * FINE for side in box)
    width = (right - left) / len(steps)
    points: list[tuple[float, float]] = []
    for number, step in enumerate(steps):
        part = 1 - (number + 0.5) / len(steps)
        sigma = SHIFT * part / (1 + (SHIFT - 1) * part)
        height = (bottom - top) * sigma
        at, inset = left + number * width, width * 0.16
        bar = (at + inset, bottom - height * 0.86, at + width - inset, bottom)
        pen.rounded_rectangle(
            bar, width * 0.16, fill=BLUE if step == "x" else None, outline=BLUE if step == "x" else PALE, width=2 * FINE
        )
        points.append((at + width / 2, bottom - height))
    draw_curve(pen, points, round(0.14 * width))


def draw_curve(pen: ImageDraw.ImageDraw, points: Sequence[tuple[float, float]], width: int) -> None:
    pen.line(points, fill=AMBER, width=width, joint="curve")
    for x, y in points[:: len(points) - 1]:
        pen.ellipse((x - width / 2, y - width / 2, x + width / 2, y + width / 2), fill=AMBER)


def icon() -> Image.Image:
    image, pen = drawn(ICON, 72)
    draw_steps(pen, (52, 74, 348, 330), "xxx.x.xx")
    return image.resize(ICON, Image.Resampling.LANCZOS)


def banner() -> Image.Image:
    image, pen = drawn(BANNER, 0)
    draw_steps(pen, (740, 110, 1200, 440), STEPS)
    for text, place, size, colour in (
        ("WanCore", (70, 120), 120, WHITE),
        ("Faster Wan 2.1 and 2.2 video", (76, 285), 40, BLUE),
        ("in the ComfyUI workflow you have", (76, 337), 40, BLUE),
        ("One node, or an engine of its own", (76, 410), 28, "#9aa7b8"),
    ):
        font = ImageFont.load_default(size * FINE)  # a font that Pillow contains: the same picture on every machine
        pen.text((place[0] * FINE, place[1] * FINE), text, font=font, fill=colour)
    return image.resize(BANNER, Image.Resampling.LANCZOS).convert("RGB")


def main(folder: Path = FOLDER) -> None:
    icon().save(folder / "icon.png", optimize=True)
    banner().save(folder / "banner.png", optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))

"""Draw the pictures of the templates in ComfyUI's template browser, `workflows/<template>.jpg`.

    python -m tools.thumbnails

Each has a sign of what the template does, its name in letters that can be read at 200 pixels, and what it downloads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable

from PIL import Image, ImageDraw, ImageFont

from tools.workflows import TITLE, WORKFLOWS, all_nodes, files_of, known_files

SIDE, SCALE = 400, 3  # pixels of the picture, and how many times larger it is drawn
INK, PAPER, GREEN, RED, BLUE, YELLOW, GREY = "#f4f4f0", "#1d232b", "#55b36a", "#e05252", "#4f8fd9", "#f0c04a", "#8b94a1"
Point = tuple[float, float]


class Sheet:
    """A drawing in units of the finished picture."""

    def __init__(self, ground: str) -> None:
        self.image = Image.new("RGB", (SIDE * SCALE, SIDE * SCALE), ground)
        self.pen = ImageDraw.Draw(self.image)

    def box(self, x: float, y: float, width: float, height: float, fill: str | None, line: str | None = None) -> None:
        corners = [one * SCALE for one in (x, y, x + width, y + height)]
        self.pen.rounded_rectangle(corners, 8 * SCALE, fill, line, 5 * SCALE if line else 0)

    def disc(self, x: float, y: float, radius: float, fill: str | None, line: str | None = None) -> None:
        corners = [one * SCALE for one in (x - radius, y - radius, x + radius, y + radius)]
        self.pen.ellipse(corners, fill, line, 5 * SCALE if line else 0)

    def shape(self, fill: str, *points: Point) -> None:
        self.pen.polygon([(x * SCALE, y * SCALE) for x, y in points], fill)

    def line(self, fill: str, *points: Point, width: float = 6) -> None:
        self.pen.line([(x * SCALE, y * SCALE) for x, y in points], fill, round(width * SCALE), joint="curve")

    def text(self, x: float, y: float, words: str, size: float, fill: str = INK, anchor: str = "mm") -> None:
        self.pen.text((x * SCALE, y * SCALE), words, fill, ImageFont.load_default(size * SCALE), anchor)

    def play(self, x: float, y: float, size: float, fill: str = INK) -> None:
        self.shape(fill, (x - size * 0.8, y - size), (x - size * 0.8, y + size), (x + size, y))

    def arrow(self, x: float, y: float, length: float = 34, angle: float = 0.0, fill: str = INK) -> None:
        dx, dy = math.cos(angle), math.sin(angle)
        end = (x + length * dx, y + length * dy)
        self.line(fill, (x, y), end, width=8)
        tip = (end[0] + 18 * dx, end[1] + 18 * dy)
        self.shape(fill, tip, (end[0] - 16 * dy, end[1] + 16 * dx), (end[0] + 16 * dy, end[1] - 16 * dx))

    def picture(self, x: float, y: float, width: float = 120, height: float = 100) -> None:
        """A landscape in a frame."""
        self.box(x, y, width, height, "#9cc7ee")
        self.disc(x + width * 0.75, y + height * 0.28, height * 0.13, YELLOW)
        low = y + height - 6
        self.shape(GREEN, (x + 6, low), (x + width * 0.36, y + height * 0.36), (x + width * 0.72, low))
        self.shape("#3c8a50", (x + width * 0.42, low), (x + width * 0.7, y + height * 0.52), (x + width - 6, low))
        self.box(x, y, width, height, None, INK)

    def film(self, x: float, y: float, width: float = 130, height: float = 100) -> None:
        self.box(x, y, width, height, "#39434f", INK)
        for k in range(5):
            for hole in (y + 9, y + height - 19):
                self.box(x + 13 + k * (width - 36) / 4, hole, 10, 10, INK)
        self.play(x + width / 2, y + height / 2, 20)

    def person(self, x: float, y: float, raised: bool, fill: str = INK) -> None:
        """120 high, the head's middle at the point."""
        self.disc(x, y, 17, fill)
        self.line(fill, (x, y + 17), (x, y + 75), width=9)
        self.line(fill, (x, y + 75), (x - 24, y + 106), width=9)
        self.line(fill, (x, y + 75), (x + (42 if raised else 24), y + (92 if raised else 106)), width=9)
        hand = -8 if raised else 66
        self.line(fill, (x, y + 36), (x - 34, y + hand), width=9)
        self.line(fill, (x, y + 36), (x + 36, y + (10 if raised else 66)), width=9)

    def chip(self, x: float, y: float, size: float, words: str = "GPU") -> None:
        for k in range(4):
            place = size * (0.2 + 0.2 * k)
            self.line(GREY, (x + place, y - 12), (x + place, y + size + 12), width=6)
            self.line(GREY, (x - 12, y + place), (x + size + 12, y + place), width=6)
        self.box(x, y, size, size, "#2f7d4a", INK)
        self.text(x + size / 2, y + size / 2, words, size * 0.3)


# ---------------------------------------------------------------------------------------------------- a sign for each


def accelerate(s: Sheet) -> None:
    s.box(40, 70, 110, 100, "#39434f", GREY)
    s.box(250, 70, 110, 100, "#39434f", GREY)
    s.text(95, 120, "model", 26, GREY)
    s.text(305, 120, "sample", 26, GREY)
    s.line(INK, (150, 120), (250, 120))
    s.disc(200, 120, 52, "#2a7f86", INK)
    s.play(186, 120, 22)
    s.play(218, 120, 22)


def image_to_video(s: Sheet) -> None:
    s.picture(36, 70)
    s.arrow(172, 120)
    s.film(240, 70)


def text_to_video(s: Sheet) -> None:
    s.box(36, 70, 120, 100, "#fbfaf4", INK)
    s.text(96, 120, "Aa", 64, PAPER)
    s.arrow(172, 120)
    s.film(240, 70)


def first_last(s: Sheet) -> None:
    s.picture(24, 74, 104, 92)
    s.arrow(142, 120, 24)
    s.film(196, 84, 84, 72)
    s.box(296, 74, 84, 92, "#2d3f6b", INK)
    s.disc(352, 100, 13, INK)
    s.shape(GREEN, (303, 160), (334, 112), (372, 160))


def small_card(s: Sheet) -> None:
    s.box(60, 76, 270, 96, "#2f7d4a", INK)
    s.disc(130, 124, 34, "#1d4f2f", INK)
    s.disc(230, 124, 34, "#1d4f2f", INK)
    s.box(330, 66, 12, 116, GREY)
    for k in range(6):
        s.line(YELLOW, (90 + 26 * k, 176), (90 + 26 * k, 192), width=12)
    s.text(294, 124, "8G", 30)


def five_b(s: Sheet) -> None:
    s.text(120, 120, "5B", 108, YELLOW)
    s.arrow(205, 120, 20)
    s.film(254, 70, 122)


def animate(s: Sheet) -> None:
    s.film(26, 46, 132, 178)
    s.box(40, 72, 104, 128, "#39434f")
    s.person(92, 90, True, YELLOW)
    s.arrow(178, 124, 30)
    s.box(252, 46, 122, 178, "#fbfaf4", INK)
    s.person(313, 90, True, RED)


def sound(s: Sheet) -> None:
    for k, high in enumerate((24, 56, 86, 44, 70, 30)):
        s.line(YELLOW, (40 + 22 * k, 124 - high), (40 + 22 * k, 124 + high), width=11)
    s.arrow(180, 124, 28)
    s.disc(310, 124, 76, "#f2cfae", INK)
    s.disc(284, 104, 8, PAPER)
    s.disc(336, 104, 8, PAPER)
    s.disc(310, 152, 22, RED)


def control(s: Sheet) -> None:
    s.box(30, 62, 130, 124, "#101418", INK)
    s.disc(95, 112, 30, None, INK)
    s.line(INK, (44, 176), (95, 136), (148, 176), width=5)
    s.arrow(176, 124, 28)
    s.box(244, 62, 130, 124, "#9cc7ee", INK)
    s.disc(309, 112, 30, YELLOW)
    s.shape(GREEN, (252, 180), (309, 136), (366, 180))


def inpainting(s: Sheet) -> None:
    s.picture(90, 46, 220, 160)
    s.box(196, 100, 74, 84, "#fbfaf4", RED)
    s.text(233, 142, "?", 66, RED)


def outpainting(s: Sheet) -> None:
    s.box(60, 36, 280, 184, "#39434f", GREY)
    s.picture(140, 80, 120, 96)
    for x, y, angle in ((128, 128, math.pi), (272, 128, 0.0), (200, 74, -math.pi / 2), (200, 184, math.pi / 2)):
        s.arrow(x, y, 12 if abs(math.sin(angle)) > 0.5 else 34, angle, YELLOW)


def reference(s: Sheet) -> None:
    s.box(66, 40, 92, 104, "#fbfaf4", INK)
    s.shape(BLUE, (112, 58), (142, 124), (82, 124))
    s.box(30, 104, 92, 104, "#fbfaf4", INK)
    s.disc(76, 156, 32, RED)
    s.arrow(176, 124, 28)
    s.film(244, 58, 132, 132)
    s.box(260, 84, 100, 80, "#9cc7ee")
    s.disc(290, 132, 22, RED)
    s.shape(BLUE, (334, 96), (356, 152), (312, 152))


def camera(s: Sheet) -> None:
    s.box(100, 80, 150, 104, "#39434f", INK)
    s.shape(INK, (256, 118), (310, 88), (310, 176), (256, 146))
    s.disc(140, 62, 28, "#39434f", INK)
    s.disc(210, 62, 28, "#39434f", INK)
    s.arrow(84, 132, 24, math.pi, YELLOW)
    s.arrow(324, 132, 24, 0.0, YELLOW)


def several(s: Sheet) -> None:
    for k in range(4):
        s.chip(34 + 112 * (k % 2), 40 + 104 * (k // 2), 66)
    s.arrow(236, 124, 18)
    s.film(286, 84, 92, 80)


def toy_text(s: Sheet) -> None:
    s.box(60, 46, 280, 160, "#2f5fb0", INK)
    for k, shade in enumerate(("#3d5da0", "#6a5a8a", "#a5576c", RED)):
        s.disc(112 + 52 * k, 126, 36, shade)


def toy_picture(s: Sheet) -> None:
    s.box(34, 66, 116, 116, "#fbfaf4", INK)
    s.box(68, 118, 48, 48, GREEN)
    s.arrow(168, 124, 28)
    s.film(236, 54, 136, 140)
    s.box(254, 80, 100, 88, "#fbfaf4")
    s.box(280, 84, 44, 44, GREEN)


def toy_driven(s: Sheet) -> None:
    s.box(34, 46, 140, 70, "#2f5fb0", INK)
    for k, shade in enumerate(("#6a5a8a", "#a5576c", RED)):
        s.disc(70 + 34 * k, 81, 22, shade)
    s.box(34, 136, 140, 70, "#fbfaf4", INK)
    s.box(84, 150, 40, 40, GREEN)
    s.arrow(192, 126, 28)
    s.box(256, 82, 120, 88, "#fbfaf4", INK)
    for k, shade in enumerate(("#cfe5d4", "#93c9a0", GREEN)):
        s.box(268 + 26 * k, 104, 42, 42, shade)


def endless(s: Sheet) -> None:
    s.picture(34, 76, 92, 84)
    for k in range(3):
        s.film(150 + 76 * k, 66, 96, 104)
    s.arrow(338, 190, 20)
    s.line(INK, (80, 190), (338, 190), width=8)


def motion(s: Sheet) -> None:
    for k, length in enumerate((46, 66, 92)):
        s.line(YELLOW, (60, 84 + 40 * k), (60 + length, 84 + 40 * k), width=10)
    s.person(230, 76, True)
    s.arrow(300, 124, 36)


def keyframes(s: Sheet) -> None:
    s.line(GREY, (30, 124), (370, 124), width=8)
    for k, high in enumerate((124, 98, 72)):
        s.box(36 + 120 * k, 66, 92, 116, "#fbfaf4", INK)
        s.box(62 + 120 * k, high, 40, 40, GREEN)


def prompts(s: Sheet) -> None:
    for k, shade in enumerate((RED, YELLOW, GREEN)):
        s.box(34 + 112 * k, 60, 104, 44, shade)
        s.text(86 + 112 * k, 82, "Aa", 32, PAPER)
    s.box(34, 122, 328, 84, "#2f5fb0", INK)
    for k, shade in enumerate((RED, YELLOW, GREEN)):
        s.disc(86 + 112 * k, 164, 30, shade)


SIGNS: tuple[Callable[[Sheet], None], ...] = (
    accelerate, image_to_video, text_to_video, first_last, small_card, five_b, animate, sound, control, inpainting,
    outpainting, reference, camera, several, toy_text, toy_picture, toy_driven,
    endless, motion, keyframes, prompts,
)  # fmt: skip
WORDS = {  # template's number -> its name in two lines, where the file's name is too long
    1: ("Your workflow", "+ Accelerate"),
    2: ("Image to video", "Wan 2.2 14B, 4 steps"),
    3: ("Text to video", "Wan 2.2 14B, 4 steps"),
    4: ("First + last frame", "Wan 2.2 14B, 4 steps"),
    5: ("Small card", "GGUF, 480p, 4 steps"),
    6: ("5B model", "text or picture"),
    7: ("Animate 2", "move as in a video"),
    8: ("Sound to video", "speak or sing"),
    9: ("VACE control", "follow a video"),
    10: ("VACE inpainting", "a part made anew"),
    11: ("VACE outpainting", "more picture"),
    12: ("VACE reference", "one or more pictures"),
    13: ("Fun camera", "camera motion"),
    14: ("Several GPUs", "text to video, 720p"),
    15: ("Test: text", "no download"),
    16: ("Test: picture", "no download"),
    17: ("Test: driven", "no download"),
    18: ("Endless video", "SVI 2.0 Pro, 4 steps"),
    19: ("Motion", "with four steps"),
    20: ("Keyframes", "pictures on the way"),
    21: ("Prompts over time", "another from a frame on"),
}


def draw(number: int, gigabytes: float) -> Image.Image:
    """gigabytes: of the files that the template names."""
    sheet = Sheet(PAPER)
    SIGNS[number - 1](sheet)
    first, second = WORDS[number]
    sheet.box(-10, 240, SIDE + 20, SIDE, "#2a7f86" if gigabytes else "#3c8a50")
    sheet.text(SIDE / 2, 280, first, 46)
    sheet.text(SIDE / 2, 326, second, 34)
    sheet.text(20, 374, "WanCore", 28, anchor="lm")
    sheet.text(SIDE - 20, 374, f"{gigabytes:.0f} GB" if gigabytes else "0 GB", 28, YELLOW, anchor="rm")
    return sheet.image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def main() -> None:
    known = known_files()
    for path in sorted(WORKFLOWS.glob("*.json")):
        title = TITLE.match(path.stem)
        assert title is not None, f"{path.name} has no number"
        page = json.loads(path.read_text(encoding="utf-8"))
        names = {name for node in all_nodes(page) for name in files_of(node)}
        draw(int(path.stem[8:10]), sum(known[name].gb for name in names)).save(
            path.with_suffix(".jpg"), quality=68, optimize=True
        )


if __name__ == "__main__":
    main()

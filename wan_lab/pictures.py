"""Pictures of a comparison: quality over time, videos side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from wan_core.media.pictures import FAINT, INK, LINE, PAPER, PHASE_COLOUR, Canvas
from wan_lab.compare import pareto

KIND_COLOUR = {"magcache": "#f2a65a", "taylorseer": "#5aa9e6", "guidance": "#7bc47f"}


def draw_quality(rows: Sequence[Mapping[str, Any]], title: str) -> Image.Image:
    """Mean PSNR of every setting (and the worst, as a tail) over its time in percent of the full run's; the line is the
    Pareto front. Points have numbers, and the names are in a list."""
    size = (960, 600)
    canvas = Canvas(*size)
    left, right, top, bottom = 64, size[0] - 330, 64, size[1] - 56
    canvas.text(24, 16, title, size=17)
    share = {row["name"]: 100 / row["ratio"] for row in rows}
    most = max(100.0, *share.values()) * 1.03
    worst = min((row["psnr_worst"] for row in rows), default=20.0)
    best = min(60.0, max((row["psnr"] for row in rows), default=50.0) + 2)
    least = min(np.floor(worst / 5) * 5, best - 5)  # all may be above what the axis shows

    def place(percent: float, quality: float) -> tuple[float, float]:
        y = top + (best - min(best, quality)) / (best - least) * (bottom - top)
        return left + percent / most * (right - left), y

    each = 10 if most <= 110 else np.ceil(most / 100) * 10
    for percent in np.arange(0, most, each):
        x, _ = place(percent, 0)
        canvas.line([(x, top), (x, bottom)], LINE)
        canvas.text(x, bottom + 8, f"{percent:g} %", FAINT, 11, "mt")
    for quality in np.arange(least, best + 0.01, 5):
        _, y = place(0, quality)
        canvas.line([(left, y), (right, y)], LINE)
        canvas.text(left - 8, y, f"{quality:g}", FAINT, 11, "rm")
    canvas.text(left, top - 10, "PSNR against the full run, dB: mean, and a tail to the worst video", FAINT, 11, "ls")
    canvas.text(right, bottom + 26, "time of a video, the full run's is 100 %", FAINT, 11, "rt")
    front = pareto({row["name"]: (-share[row["name"]], row["psnr"]) for row in rows})
    ordered = sorted(rows, key=lambda row: share[row["name"]])
    points = {row["name"]: place(share[row["name"]], row["psnr"]) for row in ordered}
    if len(front) > 1:
        canvas.line([points[name] for name in front], PHASE_COLOUR, 1.5)
    taken = list(points.values())
    for number, row in enumerate(ordered, 1):
        x, y = points[row["name"]]
        colour = KIND_COLOUR.get(row["name"].partition(":")[0], KIND_COLOUR["guidance"])
        color = INK if row["name"] in front else FAINT
        canvas.line([(x, y), place(share[row["name"]], row["psnr_worst"])], colour, 1)
        canvas.dot(x, y, 5, colour if row["name"] in front else PAPER, colour)
        label = y
        while any(abs(label - b) < 12 and abs(x + 13 - a) < 12 for a, b in taken):  # below what is there
            label += 1
        taken.append((x + 13, label))
        canvas.text(x + 13, label, f"{number}", color, 11, "mm")
        canvas.text(right + 24, top + 18 * number, f"{number}   {row['name']}"[:52], color, 11, "lm")
    return canvas.finish()


def side_by_side(videos: Mapping[str, Tensor], width: int = 240) -> Tensor:
    """Videos [F, H, W, 3] of one size and dtype (uint8, or floating point 0..1), each under its name: [F, rows,
    columns, 3] of that dtype, each enlarged to at least `width` pixels, up to four in a row."""
    first = next(iter(videos.values()))
    frames, height, across, _ = first.shape
    scale = max(1, -(-width // across))
    w, h, bar = across * scale, height * scale, 20
    columns = min(4, len(videos))
    rows = -(-len(videos) // columns)
    sheet = first.new_zeros(frames, _even(rows * (h + bar)), _even(columns * w), 3)
    for at, (name, video) in enumerate(videos.items()):
        y, x = at // columns * (h + bar), at % columns * w
        caption = torch.from_numpy(_caption(name, w, bar))
        sheet[:, y : y + bar, x : x + w] = caption if sheet.dtype == torch.uint8 else caption / 255
        sheet[:, y + bar : y + bar + h, x : x + w] = video.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    return sheet


def _caption(name: str, width: int, height: int) -> np.ndarray:
    picture = Image.new("RGB", (width, height), PAPER)
    ImageDraw.Draw(picture).text((6, height / 2), name, INK, ImageFont.load_default(12), "lm")
    return np.array(picture)


def _even(length: int) -> int:
    return length + length % 2  # H.264 with subsampled colours needs even sides

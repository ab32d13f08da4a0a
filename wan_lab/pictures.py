"""Pictures of calibration and comparison: curves with skipped steps, quality over time, videos side by
side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from wan_core.config import SkipOptions
from wan_core.media.pictures import EXPERT_COLOUR, EXPERT_SHADE, FAINT, INK, LINE, PAPER, PHASE_COLOUR, Canvas
from wan_core.sampling.cache.magcache import BRANCHES, PRESETS, Curve
from wan_core.sampling.cache.skipping import leave_out
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.budgets import Coverage, choose_keeps
from wan_core.sampling.steps import Expert
from wan_lab.compare import pareto

SIZE = (960, 540)  # of the pictures of a calibration
KIND_COLOUR = {"magcache": "#f2a65a", "taylorseer": "#5aa9e6", "adaptive": "#c58af9", "guidance": "#7bc47f"}


def preset_plans(plan: Plan, curve: Curve) -> dict[str, Plan]:
    """`plan` with each preset of MagCache and this curve."""
    return {name: leave_out(plan, SkipOptions(magcache=preset), curve) for name, preset in PRESETS.items()}


def draw_curve(curve: Curve, plans: Mapping[str, Plan]) -> Image.Image:
    """The ratio of every step by branch, the boundary, and a row of cells for each plan, filled for computed steps.

    plans: by name; with as many steps as the curve.
    """
    rows = 30 * len(plans)
    canvas = Canvas(*SIZE)
    left, right, top, bottom = 72, SIZE[0] - 24, 84, SIZE[1] - 64 - rows
    samples = "" if curve.samples is None else f", {curve.samples} videos"
    canvas.text(24, 16, f"{curve.task}   MagCache curve   {curve.steps} steps   shift {curve.shift:g}", size=17)
    canvas.text(24, 40, f"{curve.source}{samples}"[:130], FAINT, 12)
    width = (right - left) / curve.steps
    experts: tuple[Expert, ...] = ("high", "low")
    low = min(min(curve.phase(e, b), default=1.0) for e in experts for b in BRANCHES)
    low, high = min(0.9, low - 0.02), 1.02

    def height(ratio: float) -> float:
        return top + (high - max(low, min(high, ratio))) / (high - low) * (bottom - top)

    for step in range(curve.steps):
        expert = "high" if step < curve.high_steps else "low"
        canvas.box(left + step * width, top, left + (step + 1) * width, bottom, EXPERT_SHADE[expert])
    for ratio in np.linspace(low, high, 5):
        canvas.line([(left, height(ratio)), (right, height(ratio))], LINE)
        canvas.text(left - 8, height(ratio), f"{ratio:.2f}", FAINT, 11, "rm")
    canvas.text(left, top - 8, "magnitude of the residual over the step before", FAINT, 11, "ls")
    for expert, first, end in (("high", 1, curve.high_steps), ("low", curve.high_steps + 1, curve.steps)):
        for ratios, colour in ((curve.uncond, FAINT), (curve.cond, EXPERT_COLOUR[expert])):
            points = [(left + (t + 0.5) * width, height(ratios[t])) for t in range(first, end)]
            if len(points) > 1:
                canvas.line(points, colour, 2)
    if 0 < curve.high_steps < curve.steps:
        x = left + curve.high_steps * width
        canvas.line([(x, top), (x, bottom)], INK)
        canvas.text(x + 6, top + 4, f"boundary {curve.boundary:g}", INK, 11)
    for step in range(0, curve.steps, max(1, -(-curve.steps // 20))):
        canvas.text(left + (step + 0.5) * width, bottom + 6, f"{step}", FAINT, 11, "mt")
    y = bottom + 30
    for name, plan in plans.items():
        canvas.text(left - 8, y + 9, name, INK, 12, "rm")
        for step in plan.steps:
            x = left + step.index * (right - left) / len(plan.steps)
            end = x + (right - left) / len(plan.steps)
            share = 1 - len(step.skipped) / len(step.branches)  # of a step that one branch skips, the lower half
            canvas.box(x + 0.5, y, end - 1, y + 18, PAPER, EXPERT_COLOUR[step.expert])
            if share:
                canvas.box(x + 0.5, y + 18 * (1 - share), end - 1, y + 18, EXPERT_COLOUR[step.expert])
        y += 30
    saved = "   ".join(f"{name}: {100 * plan.saved:.0f} % saved" for name, plan in plans.items())
    canvas.text(
        left,
        SIZE[1] - 16,
        f"coloured: conditional   grey: unconditional   hollow: skipped   {saved}",
        FAINT,
        11,
        "ls",
    )
    return canvas.finish()


def draw_coverage(coverages: Mapping[Expert, Coverage]) -> Image.Image:
    """A panel for each expert: the attention mass that selected blocks cover over their share, a line per layer, and
    each layer's share at 25 % on average."""
    canvas = Canvas(*SIZE)
    first = next(iter(coverages.values()))
    title = f"{first.task}   attention covered by chosen blocks   {first.tokens} tokens, blocks of {first.block}"
    canvas.text(24, 16, title, size=17)
    canvas.text(
        24, 40, f"{first.source}: a line for each layer, its heads' mean; below, what each reads at 25 %", FAINT, 12
    )
    width = (SIZE[0] - 48) / len(coverages)
    for number, (expert, one) in enumerate(coverages.items()):
        left, right = 24 + number * width + 44, 24 + (number + 1) * width - 12
        top, bottom = 84, SIZE[1] - 130

        def at(share: float, mass: float, box: tuple[float, ...] = (left, right, top, bottom)) -> tuple[float, float]:
            return box[0] + share * (box[1] - box[0]), box[3] - mass * (box[3] - box[2])

        for mark in (0, 0.25, 0.5, 0.75, 1):
            canvas.line([at(0, mark), at(1, mark)], LINE)
            canvas.text(left - 8, at(0, mark)[1], f"{mark:g}", FAINT, 11, "rm")
            canvas.text(at(mark, 0)[0], bottom + 14, f"{100 * mark:g} %", FAINT, 11, "mm")
        canvas.text(left, top - 8, f"{expert}-noise expert", INK, 12, "ls")
        for layer in range(len(one.mass)):
            points = [at(share, one.of_layer(layer, share)) for share in (0, *one.shares)]
            canvas.line(points, EXPERT_COLOUR[expert])
        keeps = choose_keeps(one, 0.25)
        step = (right - left) / len(keeps)
        for layer, keep in enumerate(keeps):
            x = left + layer * step
            canvas.box(x + 1, SIZE[1] - 24 - 70 * keep, x + step - 1, SIZE[1] - 24, PHASE_COLOUR)
        canvas.text(left - 8, SIZE[1] - 24, "0", FAINT, 11, "rm")
        canvas.text(left - 8, SIZE[1] - 94, "1", FAINT, 11, "rm")
    return canvas.finish()


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

"""A plan and a report as pictures, drawn with Pillow alone.

Everything is drawn at twice its size and scaled down, which smooths lines that Pillow draws jagged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from wan_core.execution.report import Report
from wan_core.sampling.plan import Expert, Plan, Step

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


# ------------------------------------------------------------------------------------------------------------- the plan


def draw_plan(plan: Plan, seconds: float | None = None, size: tuple[int, int] = (960, 540)) -> Image.Image:
    """The sigma of every step, who runs it, the boundary, guidance, branches and skipped steps; RGB.

    seconds: the estimate for the whole run, if there is one.
    """
    canvas = Canvas(*size)
    left, right, top, bottom = 56, size[0] - 24, 64, size[1] - 132
    canvas.text(24, 16, f"{plan.task}   {len(plan.steps)} steps   {plan.solver}   shift {plan.shift:g}", size=17)
    time = "time unknown before a first run" if seconds is None else f"about {clock(seconds)}"
    canvas.text(size[0] - 24, 19, f"{plan.forward_words()}   {time}", FAINT, anchor="ra")

    step_width = (right - left) / len(plan.steps)
    for step in plan.steps:  # whose step it is, behind everything
        x = left + step.index * step_width
        canvas.box(x, top, x + step_width, bottom, EXPERT_SHADE[step.expert])
    _draw_axes(canvas, plan, (left, top, right, bottom))
    points = [(left + i * step_width, top + (1 - sigma) * (bottom - top)) for i, sigma in enumerate(plan.sigmas)]
    for step in plan.steps:
        canvas.line(points[step.index : step.index + 2], EXPERT_COLOUR[step.expert], 2)
    for step in plan.steps:
        colour, skipped = EXPERT_COLOUR[step.expert], step.skipped == step.branches
        canvas.dot(*points[step.index], min(4, max(1.5, step_width / 3)), PAPER if skipped else colour, colour)
    _draw_guidance(canvas, plan, left, step_width, bottom + 40)
    _draw_legend(canvas, plan, size[1] - 24)
    return canvas.finish()


def _draw_axes(canvas: Canvas, plan: Plan, area: tuple[float, float, float, float]) -> None:
    left, top, right, bottom = area
    for sigma in (0, 0.25, 0.5, 0.75, 1):
        y = top + (1 - sigma) * (bottom - top)
        canvas.line([(left, y), (right, y)], LINE)
        canvas.text(left - 8, y, f"{sigma:g}", FAINT, 11, "rm")
    canvas.text(left, top - 8, "sigma (share of noise)", FAINT, 11, "ls")
    count = len(plan.steps)
    for index in range(0, count, max(1, -(-count // 20))):
        x = left + (index + 0.5) * (right - left) / count
        canvas.text(x, bottom + 8, f"{index}", FAINT, 11, "mt")
    if 0 < plan.boundary < 1:
        y = top + (1 - plan.boundary) * (bottom - top)
        for x in range(int(left), int(right), 12):
            canvas.line([(x, y), (min(x + 6, right), y)], INK)
        canvas.text(right - 6, y - 4, f"boundary {plan.boundary:g}", INK, 11, "rs")


def _draw_guidance(canvas: Canvas, plan: Plan, left: float, step_width: float, top: float) -> None:
    """A cell per step, its lower half the conditional branch, its upper half the other where there is one: filled where
    the blocks run. Numbers where they change."""
    canvas.text(left - 8, top + 12, "guid.", FAINT, 11, "rm")
    before: Step | None = None
    for step in plan.steps:
        x, colour = left + step.index * step_width, EXPERT_COLOUR[step.expert]
        guided = "uncond" in step.branches
        halves = {"uncond": (top, top + 12), "cond": (top + 12, top + 24)}
        for branch in step.branches:
            if branch not in step.skipped:
                canvas.box(x + 0.5, halves[branch][0], x + step_width - 0.5, halves[branch][1], colour, colour)
        canvas.box(x + 0.5, top if guided else top + 12, x + step_width - 0.5, top + 24, None, colour)
        if before is None or (before.guidance, before.expert) != (step.guidance, step.expert):
            canvas.text(x + 4, top + 30, f"{step.guidance:g}" + ("" if guided else " (off)"), colour, 12)
        before = step


def _draw_legend(canvas: Canvas, plan: Plan, y: float) -> None:
    x = 56.0
    for expert in plan.experts:
        count = sum(step.expert == expert for step in plan.steps)
        canvas.dot(x, y, 5, EXPERT_COLOUR[expert], EXPERT_COLOUR[expert])
        words = f"{expert}-noise expert: {count} steps" if plan.boundary else f"one model: {count} steps"
        canvas.text(x + 12, y, words, INK, 12, "lm")
        x += 210
    skipped = sum(step.action != "compute" for step in plan.steps)
    if skipped:
        canvas.dot(x, y, 5, PAPER, INK)
        words = "may be skipped" if plan.adaptive else "skipped in all or part"
        if not plan.adaptive and all(step.skipped in ((), step.branches) for step in plan.steps):
            words = "skipped"
        canvas.text(x + 12, y, f"{words}: {skipped} steps", INK, 12, "lm")


# ----------------------------------------------------------------------------------------------------------- the report


def draw_report(report: Report, width: int = 960) -> Image.Image:
    """Phases as bars of seconds with their peak memory, then settings and notes; RGB."""
    facts = report.as_dict()
    phases: dict[str, dict[str, Any]] = facts["phases"]
    words = [*report.setting_lines(), *(f"note: {note}" for note in report.notes)]
    lines = [line for text in words for line in _wrapped(text, 120)]
    canvas = Canvas(width, 72 + 26 * len(phases) + 40 + 18 * len(lines) + 16)
    canvas.text(24, 16, f"{clock(facts['total_seconds'])} in all", size=17)
    memory = f"device {facts['peak_device_gib']:.2f} GiB   " if facts["peak_device_gib"] else ""
    canvas.text(
        width - 24, 19, f"{facts['device']}   {memory}host {facts['peak_host_gib']:.2f} GiB", FAINT, anchor="ra"
    )
    longest = max((phase["seconds"] for phase in phases.values()), default=0) or 1
    y = 60.0
    for name, phase in phases.items():
        expert: Expert | None = next((e for e in ("high", "low") if name.endswith(f" {e}")), None)
        colour = EXPERT_COLOUR[expert] if expert else PHASE_COLOUR
        canvas.text(24, y + 8, name, INK, 13, "lm")
        end = 160 + (width - 460) * phase["seconds"] / longest
        canvas.box(160, y, max(end, 162), y + 16, colour)
        canvas.text(max(end, 162) + 8, y + 8, _phase_words(phase), FAINT, 12, "lm")
        y += 26
    y += 16
    canvas.line([(24, y), (width - 24, y)], LINE)
    for line in lines:
        y += 18
        canvas.text(24, y, line, FAINT, 12, "lm")
    return canvas.finish()


def _phase_words(phase: dict[str, Any]) -> str:
    steps = f", {phase['steps']} steps of {phase['seconds_per_step']:.3g} s" if "steps" in phase else ""
    peak = f", peak {phase['peak_gib']:.2f} GiB" if "peak_gib" in phase else ""
    return f"{phase['seconds']:.2f} s{steps}{peak}"


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters; later ones are indented."""
    lines = [text[:width]]
    for start in range(width, len(text), width - 4):
        lines.append("    " + text[start : start + width - 4])
    return lines


def clock(seconds: float) -> str:
    """`4.2 s`, `3:07 min`, `1:02:45 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"

"""The report of a run as a picture: phases as bars, then settings and notes."""

from __future__ import annotations

from typing import Any

from PIL import Image

from wan_core.execution.report import Report
from wan_core.media.pictures import EXPERT_COLOUR, FAINT, INK, LINE, PHASE_COLOUR, Canvas, clock
from wan_core.sampling.plan import Expert


def draw_report(report: Report, width: int = 960) -> Image.Image:
    """Warnings, phases as bars of seconds with their peak memory, then settings and notes; RGB."""
    facts = report.as_dict()
    phases: dict[str, dict[str, Any]] = facts["phases"]
    lines = [line for text in (*report.setting_lines(), *report.note_lines()) for line in _wrapped(text, 120)]
    warnings = [line for text in report.warning_lines() for line in _wrapped(text, 100)]
    canvas = Canvas(width, 72 + 22 * len(warnings) + 26 * len(phases) + 40 + 18 * len(lines) + 16)
    canvas.text(24, 16, f"{clock(facts['total_seconds'])} in all", size=17)
    memory = f"device {facts['peak_device_gib']:.2f} GiB   " if facts["peak_device_gib"] else ""
    canvas.text(
        width - 24, 19, f"{facts['device']}   {memory}host {facts['peak_host_gib']:.2f} GiB", FAINT, anchor="ra"
    )
    longest = max((phase["seconds"] for phase in phases.values()), default=0) or 1
    y = 60.0
    for line in warnings:
        canvas.text(24, y, line, EXPERT_COLOUR["high"], 15, "lm")
        y += 22
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

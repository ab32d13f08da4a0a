"""The report of a run: time and memory of each phase, settings and notes, as text, as JSON and as a picture."""

from __future__ import annotations

import json
import platform
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wan_core.config.outputs import write_text
from wan_core.sampling.plan import WARNING

if TYPE_CHECKING:
    from PIL import Image

    from wan_core.sampling.steps import Expert

GIB = 1024**3


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def installed(packages: Iterable[str]) -> dict[str, str]:
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def host_peak_bytes() -> int:
    """The largest resident memory of this process so far, in bytes; 0 if the system does not report it (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    scale = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


@dataclass
class Phase:
    """`seconds` of wall-clock time, device work included; `peak` device memory in bytes (0 on a CPU)."""

    seconds: float = 0.0
    peak: int = 0
    steps: int = 0


@dataclass
class Report:
    """Filled during a run. `settings` and `notes` say what was chosen and why, `warn` what may spoil the result."""

    device: torch.device
    settings: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, Phase] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    workers: str | None = None  # the device that ran it, if it was not this process's
    warnings: list[str] = field(default_factory=list)  # those of `notes` that are shown before everything else
    clips: list[dict[str, Any]] = field(default_factory=list)  # of a long video: the channel means of each

    def branch(self) -> Report:
        """A copy to which phases can be added without changing this report."""
        return deepcopy(self)

    def warn(self, note: str) -> None:
        """Add a note that is shown before everything else."""
        self.notes.append(note)
        self.warnings.append(note)

    def warning_lines(self) -> list[str]:
        return [WARNING + note for note in self.warnings]

    def note_lines(self) -> list[str]:
        """One line for each note that is no warning."""
        return [f"note: {note}" for note in self.notes if note not in self.warnings]

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Time a phase; synchronises with the device at start and end. Phases of the same name are added."""
        phase = self.phases.setdefault(name, Phase())
        self._synchronise()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        begin = time.perf_counter()
        try:
            yield phase
        finally:
            self._synchronise()
            phase.seconds += time.perf_counter() - begin
            if self.device.type == "cuda":
                phase.peak = max(phase.peak, torch.cuda.max_memory_allocated(self.device))

    def add_rest(self, name: str, seconds: float) -> None:
        """A phase for what of `seconds`, in which all phases so far lie, is in none of them."""
        self.phases.setdefault(name, Phase()).seconds += max(0.0, seconds - self.total_seconds)

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def total_seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())

    def as_dict(self) -> dict[str, Any]:
        return {
            "device": self.workers or device_name(self.device),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "settings": self.settings,
            "phases": {
                name: {
                    "seconds": round(p.seconds, 4),
                    **({"steps": p.steps, "seconds_per_step": round(p.seconds / p.steps, 4)} if p.steps else {}),
                    **({"peak_gib": round(p.peak / GIB, 3)} if p.peak else {}),
                }
                for name, p in self.phases.items()
            },
            "total_seconds": round(self.total_seconds, 4),
            "peak_device_gib": round(max((p.peak for p in self.phases.values()), default=0) / GIB, 3),
            "peak_host_gib": round(host_peak_bytes() / GIB, 3),
            "notes": self.notes,
            "warnings": self.warnings,
            **({"clips": self.clips} if self.clips else {}),
        }

    def save(self, path: str | Path) -> None:
        """Write it as JSON, beside and then renamed. Raises OSError."""
        write_text(path, json.dumps(self.as_dict(), indent=1) + "\n")

    def setting_lines(self) -> list[str]:
        return [f"{key}: {_text(value)}" for key, value in self.settings.items()]

    def text(self) -> str:
        """Warnings, the phases as a table, one per line, then totals and notes."""
        lines = [f"  {line}" for line in self.warning_lines()]
        for name, p in self.phases.items():
            each = f"  {p.steps} steps of {p.seconds / p.steps:.3f} s" if p.steps else ""
            peak = f"  peak {p.peak / GIB:.2f} GiB" if p.peak else ""
            lines.append(f"  {name:<14}{p.seconds:>9.2f} s{each}{peak}")
        totals = self.as_dict()
        memory = f"device {totals['peak_device_gib']:.2f} GiB, " if totals["peak_device_gib"] else ""
        host = f"host {totals['peak_host_gib']:.2f} GiB at peak"
        lines.append(f"  {'total':<14}{totals['total_seconds']:>9.2f} s  ({memory}{host})")
        lines += [f"  {line}" for line in self.note_lines()]
        return "\n".join([f"report ({totals['device']}):", *lines])


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items())
    return " x ".join(map(str, value)) if isinstance(value, list) else str(value)


class StepClock:
    """Times steps without synchronising host and device, by CUDA events that are read after they have completed."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.cuda = report.device.type == "cuda"
        self.marks: list[tuple[str, float, Any, Any]] = []  # (expert, forwards times cost, before, after)
        self.last: Any = None
        self.memory: dict[str, int] = {}

    def begin(self) -> None:
        """Mark the start of the next step. Call it when an expert is loaded."""
        self.last = self._mark()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.report.device)

    def step(self, expert: str, forwards: int, cost: float = 1.0) -> None:
        """Mark the end of a launched step of `expert`. cost: time of each forward relative to dense attention."""
        mark = self._mark()
        self.marks.append((expert, forwards * cost, self.last, mark))
        self.last = mark
        if self.cuda:
            # The allocator's counter: reading it does not synchronise.
            self.memory[expert] = torch.cuda.max_memory_allocated(self.report.device)

    def seconds_per_forward(self) -> float | None:
        """Seconds of a forward with dense attention, from the last finished step that ran one; None before that."""
        for _, forwards, before, after in reversed(self.marks):
            if forwards and (not self.cuda or after.query()):
                return self._between(before, after) / forwards
        return None

    def finish(self) -> None:
        """Synchronise and add the sums to the report, as phases `denoise high` and `denoise low`."""
        if self.cuda:
            torch.cuda.synchronize(self.report.device)
        for expert, _, before, after in self.marks:
            phase = self.report.phases.setdefault(f"denoise {expert}", Phase())
            phase.seconds += self._between(before, after)
            phase.steps += 1
            phase.peak = max(phase.peak, self.memory.get(expert, 0))

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.report.device))
        return event

    def _between(self, before: Any, after: Any) -> float:
        return before.elapsed_time(after) / 1000 if self.cuda else after - before


# -------------------------------------------------------------------------------------------------------- as a picture

WIDTH = 960  # pixels of a drawn report


def draw_report(report: Report) -> Image.Image:
    """A report as a picture: warnings, phases as bars of seconds with their peak memory, settings and notes; RGB."""
    from wan_core.media.pictures import EXPERT_COLOUR, FAINT, INK, LINE, PHASE_COLOUR, Canvas, clock

    facts = report.as_dict()
    phases: dict[str, dict[str, Any]] = facts["phases"]
    lines = [line for text in (*report.setting_lines(), *report.note_lines()) for line in _wrapped(text, 120)]
    warnings = [line for text in report.warning_lines() for line in _wrapped(text, 100)]
    canvas = Canvas(WIDTH, 72 + 22 * len(warnings) + 26 * len(phases) + 40 + 18 * len(lines) + 16)
    canvas.text(24, 16, f"{clock(facts['total_seconds'])} in all", size=17)
    memory = f"device {facts['peak_device_gib']:.2f} GiB   " if facts["peak_device_gib"] else ""
    canvas.text(
        WIDTH - 24, 19, f"{facts['device']}   {memory}host {facts['peak_host_gib']:.2f} GiB", FAINT, anchor="ra"
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
        end = 160 + (WIDTH - 460) * phase["seconds"] / longest
        canvas.box(160, y, max(end, 162), y + 16, colour)
        canvas.text(max(end, 162) + 8, y + 8, _phase_words(phase), FAINT, 12, "lm")
        y += 26
    y += 16
    canvas.line([(24, y), (WIDTH - 24, y)], LINE)
    for line in lines:
        y += 18
        canvas.text(24, y, line, FAINT, 12, "lm")
    return canvas.finish()


def _phase_words(phase: dict[str, Any]) -> str:
    steps = f", {phase['steps']} steps of {phase['seconds_per_step']:.3g} s" if "steps" in phase else ""
    peak = f", peak {phase['peak_gib']:.2f} GiB" if "peak_gib" in phase else ""
    return f"{phase['seconds']:.2f} s{steps}{peak}"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent="    ")

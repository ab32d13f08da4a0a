"""What a run did and how long it took, by phase: text for people, JSON for programs."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

GIB = 1024**3


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def host_peak_bytes() -> int:
    """The largest resident size of this process so far; 0 where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    scale = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


@dataclass
class Phase:
    """`seconds` of wall clock, device work included; `peak` device bytes while it ran (0 on a CPU)."""

    seconds: float = 0.0
    peak: int = 0
    steps: int = 0


@dataclass
class Report:
    """Filled while a run goes on. `settings` and `notes` say what was chosen and why."""

    device: torch.device
    settings: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, Phase] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    workers: str | None = None  # the device that ran it, where that was not this process's

    def branch(self) -> Report:
        """A report that goes on from here and leaves this one as it is."""
        phases = {name: replace(phase) for name, phase in self.phases.items()}
        return Report(self.device, dict(self.settings), phases, list(self.notes), self.workers)

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Time a phase, waiting for the device at both ends. The same name twice adds up."""
        phase = self.phases.setdefault(name, Phase())
        self._settle()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        begin = time.perf_counter()
        try:
            yield phase
        finally:
            self._settle()
            phase.seconds += time.perf_counter() - begin
            if self.device.type == "cuda":
                phase.peak = max(phase.peak, torch.cuda.max_memory_allocated(self.device))

    def _settle(self) -> None:
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
        }

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def setting_lines(self) -> list[str]:
        """`key: value`, one for each setting."""
        return [f"{key}: {_words(value)}" for key, value in self.settings.items()]

    def text(self) -> str:
        """The phases as a table, one a line, then totals and notes."""
        lines = []
        for name, p in self.phases.items():
            each = f"  {p.steps} steps of {p.seconds / p.steps:.3f} s" if p.steps else ""
            peak = f"  peak {p.peak / GIB:.2f} GiB" if p.peak else ""
            lines.append(f"  {name:<14}{p.seconds:>9.2f} s{each}{peak}")
        whole = self.as_dict()
        memory = f"device {whole['peak_device_gib']:.2f} GiB, " if whole["peak_device_gib"] else ""
        lines.append(
            f"  {'total':<14}{whole['total_seconds']:>9.2f} s  ({memory}host {whole['peak_host_gib']:.2f} GiB at peak)"
        )
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join([f"report ({whole['device']}):", *lines])


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(inner)}" for key, inner in value.items())
    return " x ".join(map(str, value)) if isinstance(value, list) else str(value)


class StepClock:
    """Times steps without making the host wait: marks on the device's own timeline, read when they have passed."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.cuda = report.device.type == "cuda"
        self.marks: list[tuple[str, float, Any, Any]] = []  # (expert, forwards' worth, before, after)
        self.last: Any = None
        self.memory: dict[str, int] = {}

    def begin(self) -> None:
        """The next step starts now: call it when an expert has been made ready."""
        self.last = self._mark()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.report.device)

    def step(self, expert: str, forwards: int, cost: float = 1.0) -> None:
        """A step of `expert` with so many forwards has been launched, each at `cost` of one that reads everything."""
        mark = self._mark()
        self.marks.append((expert, forwards * cost, self.last, mark))
        self.last = mark
        if self.cuda:
            self.memory[expert] = torch.cuda.max_memory_allocated(
                self.report.device
            )  # the allocator's count: no waiting

    def seconds_per_forward(self) -> float | None:
        """Of one that reads everything, by the newest step that has finished and ran any; None before the first has."""
        for _, forwards, before, after in reversed(self.marks):
            if forwards and (not self.cuda or after.query()):
                return self._between(before, after) / forwards
        return None

    def step_seconds(self) -> list[float]:
        """Of every step so far; the device must have passed them."""
        return [self._between(before, after) for _, _, before, after in self.marks]

    def finish(self) -> None:
        """Wait for the device and put the sums into the report, as phases `denoise high` and `denoise low`."""
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

"""Progress on a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any


class ProgressLine:
    """Progress on stderr: phase, step, expert, seconds per step and time left. A terminal shows one line that is
    rewritten; other outputs get one line per step."""

    def __init__(self) -> None:
        self.name = "load"
        self.begin = time.perf_counter()
        self.terminal = sys.stderr.isatty()

    def phase(self, name: str) -> None:
        self.end()
        self.name = name
        print(f"{name} ...", file=sys.stderr, flush=True)

    def step(self, progress: Any, seconds: float | None) -> None:
        done, total = progress.plan.number(progress.step), progress.plan.count
        per_step = 0.0 if seconds is None else seconds * len(progress.step.branches) * progress.step.cost
        speed = f"{per_step:.3f} s/step, {_clock(progress.left(seconds))} left" if seconds is not None else ""
        number, clips = progress.clip
        clip = f"clip {number}/{clips}  " if clips > 1 else ""
        line = f"{clip}step {done:>3}/{total}  {progress.step.expert}-noise expert  {speed}"
        print(
            f"\r{line:<78}" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr, flush=True
        )

    def end(self) -> None:
        if self.terminal and self.name == "denoise":
            print(file=sys.stderr)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"

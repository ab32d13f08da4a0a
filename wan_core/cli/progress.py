"""Progress on a terminal."""

from __future__ import annotations

import sys
import time
from typing import Any


class ProgressLine:
    """One line on stderr that is rewritten: phase, step, expert, seconds a step and time left. Plain lines where it
    is no terminal."""

    def __init__(self) -> None:
        self.name = "load"
        self.begin = time.perf_counter()
        self.terminal = sys.stderr.isatty()

    def phase(self, name: str) -> None:
        self.end()
        self.name = name
        print(f"{name} ...", file=sys.stderr, flush=True)

    def step(self, progress: Any, seconds: float | None) -> None:
        done, total = progress.step.index + 1, progress.total
        step = 0.0 if seconds is None else seconds * len(progress.step.branches) * progress.step.cost
        pace = f"{step:.3f} s/step, {_clock(progress.left(seconds))} left" if seconds is not None else ""
        line = f"step {done:>3}/{total}  {progress.step.expert}-noise expert  {pace}"
        print(
            f"\r{line:<78}" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr, flush=True
        )

    def end(self) -> None:
        if self.terminal and self.name == "denoise":
            print(file=sys.stderr)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"

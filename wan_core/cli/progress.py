"""Progress on a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from statistics import fmean
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from wan_core.sampling.plan import Plan

BAR = 14  # characters
AVERAGED = 8  # steps whose speed the time left is averaged over
GIB = 1024**3
Frame = TypeVar("Frame")


class ProgressLine:
    """Progress on stderr: phase, bar, step, expert, seconds per step, time elapsed and left.

    A terminal shows one line that is rewritten. Other outputs get one line per step, and of loading and decoding one
    every ten seconds. Nothing is raised where nobody reads stderr any more. Methods may be called from any thread.
    """

    def __init__(self, seed: int | None = None, on_planned: Callable[[], None] = lambda: None) -> None:
        """on_planned: called before the first step, after every check."""
        self.name, self.seed, self.on_planned = "load", seed, on_planned
        self.begin = time.perf_counter()
        self.terminal = sys.stderr.isatty()
        self.interval = 0.1 if self.terminal else 10.0
        self.plan: Plan | None = None
        self.speeds: list[float] = []  # seconds of a forward, after each step
        self.loaded = self.to_load = 0  # bytes
        self.shown = self.begin  # when the line was written
        self.width = 0  # of the line that will be rewritten
        self.lock = Lock()

    def phase(self, name: str) -> None:
        self.name, self.shown = name, time.perf_counter()
        self.say(f"{name} ...")
        if name == "denoise" and self.plan is not None:
            expert = self.plan.steps[0].expert
            self._show(self._bar("step", 0, self.plan.count), f"running the first, which takes longest  {expert} noise")

    def say(self, words: str) -> None:
        self.end()
        self._write(f"{words}\n")

    def planned(self, plan: Plan) -> None:
        """What will run, before its first step, after every check."""
        self.plan = plan
        self.end()
        self.on_planned()
        if self.seed is not None:
            self.say(f"seed {self.seed}")

    def found(self, parts: Any, plan: Plan | None = None) -> None:
        """The models that will be loaded (`Parts`), and what will be made."""
        if plan is not None:
            for note in plan.lines:
                self.say(note)
        self.to_load = sum(part.stored_bytes for part in parts.of.values())

    def read(self, count: int) -> None:
        with self.lock:
            first, due = not self.loaded, self._due()
            self.loaded += count
        if first and self.to_load:
            self.say(f"load {self.to_load / GIB:.2f} GiB ...")
        if due and self.to_load:
            done = min(self.loaded, self.to_load)
            self._show(self._bar("load", done, self.to_load), f"{done / GIB:.2f} GiB  {self._times()}")

    def step(self, progress: Any, seconds: float | None) -> None:
        """After a step was launched. seconds: of one forward of the last step that ended."""
        done, total = progress.plan.number(progress.step), progress.plan.count
        speed = ""
        if seconds is not None:
            self.speeds.append(seconds)
            average = fmean(self.speeds[1:][-AVERAGED:] or self.speeds)  # the first step also compiles and warms up
            each = average * len(progress.step.branches) * progress.step.cost
            speed = f"{self._times(progress.left(average))}  {each:.3f} s/step  "
        number, clips = progress.clip
        clip = f"clip {number}/{clips}  " if clips > 1 else ""
        self._show(clip + self._bar("step", done, total), f"{speed}{progress.step.expert} noise")

    def frames(self, frames: Iterator[Frame], total: int) -> Iterator[Frame]:
        """`frames`, counted while they are decoded."""
        begin = time.perf_counter()
        for done, frame in enumerate(frames, 1):
            if self.name == "decode" and (self._due() or done == total):
                left = (time.perf_counter() - begin) / done * (total - done)
                self._show(self._bar("frame", done, total), self._times(left))
            yield frame

    def end(self) -> None:
        """Leave the line as it is."""
        if self.width:
            self._write("\n")
            self.width = 0

    def _due(self) -> bool:
        """Whether it is time for another line; if so, the next is due an interval later."""
        now = time.perf_counter()
        due = now - self.shown >= self.interval
        self.shown = now if due else self.shown
        return due

    def _times(self, left: float | None = None) -> str:
        elapsed = f"{_clock(time.perf_counter() - self.begin)} elapsed"
        return elapsed if left is None else f"{elapsed}, {_clock(left)} left"

    def _bar(self, name: str, done: int, total: int) -> str:
        filled = BAR * done // total
        bar = f"[{'=' * filled}{' ' * (BAR - filled)}] " if self.terminal else ""
        return f"{bar}{name} " + (f"{100 * done // total:>3} %" if name == "load" else f"{done:>3}/{total}")

    def _show(self, bar: str, words: str) -> None:
        line = f"{bar}  {words}".rstrip()
        if not self.terminal:
            self._write(f"{line}\n")
            return
        line = line[: shutil.get_terminal_size().columns - 1]
        self._write(f"\r{line:<{self.width}}")
        self.width = len(line)

    def _write(self, text: str) -> None:
        try:
            with self.lock:
                sys.stderr.write(text)
                sys.stderr.flush()
        except BrokenPipeError:  # nobody reads it any more, and the video is worth finishing
            pass


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

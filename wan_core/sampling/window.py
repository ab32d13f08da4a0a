"""A part of a schedule: video-to-video by strength, and runs that begin or end in the middle of the steps.

Decisions about skipped forwards need the whole schedule, so a plan is made whole with the `Window` that was asked for,
and `wan_core.sampling.cutting.cut_plan` is applied last. A solver step is one or two forwards (Heun).
"""

from __future__ import annotations

from dataclasses import dataclass

from wan_core.config.checks import OptionError, check_range


@dataclass(frozen=True, kw_only=True)
class Window:
    """Which solver steps of a schedule run. Raises OptionError.

    denoise: strength of video-to-video. Below 1 the schedule has steps / denoise steps, of which the last `steps` run,
    as in ComfyUI's KSampler. start, end: of the steps that are left, the first that runs and the one after the last;
    an end beyond the last step is the last step. leftover: a run that ends early leaves its noise in the latents;
    otherwise its last step removes all of it.
    """

    denoise: float = 1.0
    start: int = 0
    end: int | None = None
    leftover: bool = False

    def __post_init__(self) -> None:
        check_range("denoise", self.denoise, 1e-4, 1, "1 starts from noise alone, 0.5 keeps half of a video's schedule")
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            end = "the last step" if self.end is None else f"step {self.end}"
            raise OptionError(
                f"start step {self.start} and end {end} given, between which no step is: the start is 0 or more, the "
                "end larger than the start"
            )

    def within(self, steps: int) -> tuple[int, Window]:
        """How many solver steps the schedule has of which `steps` are to run, and the window in it, whose strength
        is 1. Raises OptionError where no step is left."""
        whole = int(steps / self.denoise)
        if self.start >= steps:
            raise OptionError(f"start step {self.start} given, and there are {steps} steps: start earlier")
        first = whole - steps
        end = whole if self.end is None else min(whole, first + self.end)
        return whole, Window(start=first + self.start, end=end, leftover=self.leftover)

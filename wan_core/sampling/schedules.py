"""Noise schedules of flow matching: the sigmas and timesteps of a run of N steps, and parts of a schedule.

sigma is the share of noise in x = (1 - sigma) * video + sigma * noise; timestep = 1000 * sigma is the model's input.
`shift` moves an even schedule towards high noise: sigma = shift * s / (1 + (shift - 1) * s). Sigmas are rounded to
float32, as in the reference schedulers, so that trajectories can be compared. All arithmetic on them is in double
precision. Source: Wan2.2/wan/utils/fm_solvers_unipc.py and fm_solvers.py.

A run asks for a part of a schedule by a `Window`: video-to-video by strength, and runs that begin or end in the middle
of the steps. Decisions about skipped forwards need the whole schedule, so a plan is made whole with its window, and
`wan_core.sampling.plan.cut_plan` is applied last. A solver step is one or two forwards (Heun). A graph of ComfyUI
with two experts runs two samplers, each with a part of the sigmas; `find_part` finds their place in the whole schedule.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from wan_core.config.checks import OptionError, check_range

SIGMA_MAX_UNIPC = (
    0.9990000128746033  # float32(1 - 1/1000): the UniPC schedule starts at the last training timestep, not at 1
)


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def shifted(sigma: float, shift: float) -> float:
    return shift * sigma / (1 + (shift - 1) * sigma)


def unipc_schedule(steps: int, shift: float) -> tuple[list[float], list[float]]:
    """(sigmas [steps + 1] to 0, timesteps [steps]) of the official UniPC scheduler, which truncates timesteps."""
    even = [SIGMA_MAX_UNIPC * (1 - i / steps) for i in range(steps)]
    sigmas = [shifted(s, shift) for s in even]
    return [*map(float32, sigmas), 0.0], [float(int(s * 1000)) for s in sigmas]


def dpmpp_schedule(steps: int, shift: float) -> tuple[list[float], list[float]]:
    """(sigmas [steps + 1], timesteps [steps]) of the official DPM++ scheduler. It starts at pure noise and truncates
    timesteps to integers before it rounds sigmas; the other order could change the expert at the boundary."""
    exact = [shifted(even, shift) for even in from_one(steps)]
    return [*map(float32, exact), 0.0], [float(int(sigma * 1000)) for sigma in exact]


def euler_schedule(steps: int, shift: float) -> tuple[list[float], list[float]]:
    """(sigmas [steps + 1], timesteps [steps]), fractional: 4 steps at shift 5 give 1000, 937.5, 833.3, 625."""
    sigmas = [float32(shifted(even, shift)) for even in from_one(steps)]
    return [*sigmas, 0.0], [float32(sigma * 1000) for sigma in sigmas]


def given_schedule(sigmas: Sequence[float]) -> tuple[list[float], list[float]]:
    """(sigmas, timesteps) of a user's sigmas: at least two, falling, within 1 to 0. Raises OptionError."""
    falling = all(high > low for high, low in pairwise(sigmas))
    if len(sigmas) < 2 or not falling or not 0 <= sigmas[-1] < sigmas[0] <= 1:
        shown = ", ".join(f"{sigma:.4g}" for sigma in sigmas[:8])
        raise OptionError(
            f"sigmas {shown}{' ...' if len(sigmas) > 8 else ''} given; needed are at least two from 1 to 0, each below "
            "the one before: those of a flow model, as BasicScheduler makes for Wan"
        )
    rounded = [float32(sigma) for sigma in sigmas]
    return rounded, [float32(sigma * 1000) for sigma in rounded[:-1]]


Row = tuple[float, float, float, bool]
"""timestep, sigma, sigma_next, and whether it corrects the row before."""


def heun_forwards(rows: Sequence[Row]) -> list[Row]:
    """`rows` of a schedule, each that does not end at 0 followed by a forward where it ended, which ends there too."""
    forwards: list[Row] = []
    for row in rows:
        forwards.append(row)
        end = row[2]
        if end > 0:
            forwards.append((float32(end * 1000), end, end, True))
    return forwards


def from_one(steps: int) -> list[float]:
    """1, ..., 1 / steps, bit for bit numpy's linspace(1, 0, steps + 1): the last bit can change a timestep."""
    return [1 + i * (-1 / steps) for i in range(steps)]


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


@dataclass(frozen=True)
class SchedulePart:
    """Steps `first` to `first + steps - 1` of a schedule of `total`."""

    first: int
    steps: int
    total: int

    def index(self, step: int) -> int:
        """The index in the whole schedule of the part's `step`; samplers with more evaluations stay at the last."""
        return self.first + min(max(step, 0), self.steps - 1)


def unshifted(sigma: float, shift: float) -> float:
    """The noise time 0..1 that `shift` turns into `sigma`: sigma = shift * t / (1 + (shift - 1) * t)."""
    return sigma / (shift + (1 - shift) * sigma)


def find_part(sigmas: Sequence[float], shift: float) -> SchedulePart:
    """Which part of a whole schedule, from noise to video, the steps between `sigmas` are.

    Exact where the whole schedule has equal steps before the shift (simple, normal, sgm_uniform, ddim_uniform), and for
    any schedule that is whole. For others it is the share of the noise time that lies before.
    """
    steps = max(1, len(sigmas) - 1)
    if len(sigmas) < 2:
        return SchedulePart(0, 1, 1)
    begin, end = unshifted(min(1.0, sigmas[0]), shift), unshifted(min(1.0, sigmas[-1]), shift)
    if begin <= end:  # noise is added: nothing of the kind that a schedule describes
        return SchedulePart(0, steps, steps)
    total = max(steps, round(steps / (begin - end)))
    return SchedulePart(min(total - steps, round((1 - begin) * total)), steps, total)

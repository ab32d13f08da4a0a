"""Noise schedules of flow matching: the sigmas and timesteps of a run of N steps.

sigma is the share of noise in x = (1 - sigma) * video + sigma * noise; timestep = 1000 * sigma is the model's input.
`shift` moves an even schedule towards high noise: sigma = shift * s / (1 + (shift - 1) * s). Sigmas are rounded to
float32, as in the reference schedulers, so that trajectories can be compared. All arithmetic on them is in double
precision. Source: Wan2.2/wan/utils/fm_solvers_unipc.py and fm_solvers.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise

from wan_core.config.checks import OptionError

SIGMA_MAX_UNIPC = (
    0.9990000128746033  # float32(1 - 1/1000): the UniPC schedule starts at the last training timestep, not at 1
)


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def shifted(sigma: float, shift: float) -> float:
    return shift * sigma / (1 + (shift - 1) * sigma)


def unipc_schedule(steps: int, shift: float) -> tuple[list[float], list[float]]:
    """(sigmas [steps + 1] ending in 0, timesteps [steps]) of the official UniPC scheduler, which truncates timesteps to
    integers."""
    even = [SIGMA_MAX_UNIPC * (1 - i / steps) for i in range(steps)]
    sigmas = [shifted(s, shift) for s in even]
    return [*map(float32, sigmas), 0.0], [float(int(s * 1000)) for s in sigmas]


def dpmpp_schedule(steps: int, shift: float) -> tuple[list[float], list[float]]:
    """(sigmas [steps + 1], timesteps [steps]) of the official DPM++ scheduler. It starts at pure noise and truncates
    timesteps to integers before it rounds sigmas; the other order could change the expert at the boundary."""
    exact = [shifted(even, shift) for even in from_one(steps)]
    return [*map(float32, exact), 0.0], [float(int(sigma * 1000)) for sigma in exact]


def euler_schedule(steps: int, shift: float) -> tuple[list[float], list[float]]:
    """(sigmas [steps + 1], timesteps [steps]) from 1 to 0 with fractional timesteps: 4 steps at shift 5 give 1000,
    937.5, 833.3, 625."""
    sigmas = [float32(shifted(even, shift)) for even in from_one(steps)]
    return [*sigmas, 0.0], [float32(sigma * 1000) for sigma in sigmas]


def given_schedule(sigmas: Sequence[float]) -> tuple[list[float], list[float]]:
    """(sigmas, timesteps) of sigmas that a user gives: at least two, falling, the first at most 1, the last at least 0.
    Raises OptionError."""
    falling = all(high > low for high, low in pairwise(sigmas))
    if len(sigmas) < 2 or not falling or not 0 <= sigmas[-1] < sigmas[0] <= 1:
        shown = ", ".join(f"{sigma:.4g}" for sigma in sigmas[:8])
        raise OptionError(
            f"sigmas {shown}{' ...' if len(sigmas) > 8 else ''} given; needed are at least two from 1 to 0, each below "
            "the one before: those of a flow model, as BasicScheduler makes for Wan"
        )
    found = [float32(sigma) for sigma in sigmas]
    return found, [float32(sigma * 1000) for sigma in found[:-1]]


Row = tuple[float, float, float, bool]
"""timestep, sigma, sigma_next, and whether it corrects the row before."""


def heun_forwards(rows: Sequence[Row]) -> list[Row]:
    """`rows` of a schedule with a second forward after each that does not end at 0: it predicts where that one ended,
    and ends there too."""
    found: list[Row] = []
    for row in rows:
        found.append(row)
        end = row[2]
        if end > 0:
            found.append((float32(end * 1000), end, end, True))
    return found


def from_one(steps: int) -> list[float]:
    """1, ..., 1 / steps, bit for bit as numpy's linspace(1, 0, steps + 1): the last bit can change a truncated
    timestep."""
    return [1 + i * (-1 / steps) for i in range(steps)]

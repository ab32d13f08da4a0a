"""Noise schedules of flow matching: which sigmas a run of N steps visits.

sigma is the share of noise in x = (1 - sigma) * video + sigma * noise, timestep = 1000 * sigma is what the model is
told. `shift` bends an even schedule towards high noise: sigma = shift * s / (1 + (shift - 1) * s). Sigmas are rounded
to float32, which is what the reference schedulers hold, so that trajectories can be compared; all arithmetic on them
is double. Source: Wan2.2/wan/utils/fm_solvers_unipc.py and fm_solvers.py.
"""

from __future__ import annotations

import struct

SIGMA_MAX_UNIPC = (
    0.9990000128746033  # float32(1 - 1/1000): the UniPC schedule starts at the last training timestep, not at 1
)


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


def shifted(sigma: float, shift: float) -> float:
    return shift * sigma / (1 + (shift - 1) * sigma)


def unipc_schedule(steps: int, shift: float) -> tuple[list[float], list[float]]:
    """(sigmas [steps + 1] ending in 0, timesteps [steps]) of the official UniPC scheduler: timesteps cut to whole
    numbers."""
    even = [SIGMA_MAX_UNIPC * (1 - i / steps) for i in range(steps)]
    sigmas = [shifted(s, shift) for s in even]
    return [*map(float32, sigmas), 0.0], [float(int(s * 1000)) for s in sigmas]


def dpmpp_schedule(steps: int, shift: float) -> tuple[list[float], list[float]]:
    """(sigmas, timesteps) of the official DPM++ scheduler: starts at pure noise, timesteps cut to whole numbers (before
    sigmas are rounded, as there: at a boundary the difference would change the expert)."""
    exact = [shifted(even, shift) for even in from_one(steps)]
    return [*map(float32, exact), 0.0], [float(int(sigma * 1000)) for sigma in exact]


def euler_schedule(steps: int, shift: float) -> tuple[list[float], list[float]]:
    """(sigmas, timesteps) from 1 to 0 with exact, fractional timesteps: 4 steps at shift 5 are 1000, 937.5, 833.3,
    625."""
    sigmas = [float32(shifted(even, shift)) for even in from_one(steps)]
    return [*sigmas, 0.0], [float32(sigma * 1000) for sigma in sigmas]


def from_one(steps: int) -> list[float]:
    """1, ..., 1 / steps as numpy's linspace(1, 0, steps + 1) gives them: the last digit decides what is cut."""
    return [1 + i * (-1 / steps) for i in range(steps)]

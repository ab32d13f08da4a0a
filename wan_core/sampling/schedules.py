"""Noise schedules of flow matching: the sigmas and timesteps of a run of N steps.

sigma is the share of noise in x = (1 - sigma) * video + sigma * noise; timestep = 1000 * sigma is the model's input.
`shift` moves an even schedule towards high noise: sigma = shift * s / (1 + (shift - 1) * s). Sigmas are rounded to
float32, as in the reference schedulers, so that trajectories can be compared. All arithmetic on them is in double
precision. Source: Wan2.2/wan/utils/fm_solvers_unipc.py and fm_solvers.py.
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


def from_one(steps: int) -> list[float]:
    """1, ..., 1 / steps, bit for bit as numpy's linspace(1, 0, steps + 1): the last bit can change a truncated
    timestep."""
    return [1 + i * (-1 / steps) for i in range(steps)]

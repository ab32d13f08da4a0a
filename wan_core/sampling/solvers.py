"""Solvers of the flow ODE, each a function that makes one step.

    x_next, history = solver(x, velocity, i, sigmas, history)

x and velocity are float32 latents of any shape at sigmas[i]; the result is at sigmas[i + 1]. A solver holds no state:
`history` is an argument and a result, so the same call gives the same result. The coefficients are Python floats,
computed in double precision from the plan's sigmas, so nothing is read back from the device.

In the notation of the papers alpha = 1 - sigma, lambda = log(alpha / sigma), and x0 = x - sigma * velocity is the
model's prediction of the noise-free video.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, expm1, inf, log
from typing import NamedTuple

from torch import Tensor


class History(NamedTuple):
    """State of a multistep solver: up to two past x0 (newest last), the sample at the start of the last step, and that
    step's order."""

    x0: tuple[Tensor, ...] = ()
    x: Tensor | None = None
    order: int = 0


Solver = Callable[[Tensor, Tensor, int, Sequence[float], History], tuple[Tensor, History]]


def log_snr(sigma: float) -> float:
    """lambda = log((1 - sigma) / sigma): -inf at pure noise (sigma 1), +inf at the finished video (sigma 0)."""
    if sigma <= 0:
        return inf
    return log(1 - sigma) - log(sigma) if sigma < 1 else -inf


def euler(x: Tensor, velocity: Tensor, i: int, sigmas: Sequence[float], history: History) -> tuple[Tensor, History]:
    """x + (sigma_next - sigma) * velocity. Step-distilled models are trained for this solver."""
    return x + velocity * (sigmas[i + 1] - sigmas[i]), history


def dpmpp_2m(x: Tensor, velocity: Tensor, i: int, sigmas: Sequence[float], history: History) -> tuple[Tensor, History]:
    """DPM-Solver++(2M), midpoint, first order on the first and last step. Source: Lu et al. 2022, arXiv:2211.01095."""
    x0 = x - velocity * sigmas[i]
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    h = log_snr(sigma_next) - log_snr(sigma)
    x0_weight = (1 - sigma_next) * (1 - exp(-h))
    result = x * (sigma_next / sigma) + x0 * x0_weight
    if history.x0 and sigma_next > 0:
        # A past step from sigma 1 is infinitely long in lambda: ratio is 0 and the second-order term vanishes.
        ratio = h / (log_snr(sigma) - log_snr(sigmas[i - 1]))
        result = result + (x0 - history.x0[-1]) * (0.5 * x0_weight * ratio)
    return result, History((x0,))


def unipc(x: Tensor, velocity: Tensor, i: int, sigmas: Sequence[float], history: History) -> tuple[Tensor, History]:
    """UniPC of order 2, B(h) = expm1(-h) ("bh2"), predicting x0. Source: Zhao et al. 2023, arXiv:2302.04867.

    The new x0 first corrects the previous step (UniC); the next step then starts from the corrected sample (UniP).
    """
    x0 = x - velocity * sigmas[i]
    if history.x is not None:
        x = _unipc_correct(history.x, x0, i, sigmas, history)
    order = min(2, len(sigmas) - 1 - i, i + 1)  # order 1 at the first and the last step
    result, x0_weight, h = _unipc_base(x, x0, sigmas[i], sigmas[i + 1])
    if order == 2:
        past = (log_snr(sigmas[i - 1]) - log_snr(sigmas[i])) / h
        result = result + (history.x0[-1] - x0) * (0.5 * x0_weight / past)
    return result, History((*history.x0[-1:], x0), x, order)


def _unipc_base(x: Tensor, x0: Tensor, sigma: float, sigma_next: float) -> tuple[Tensor, float, float]:
    """The first-order exponential-integrator step, the weight of x0 and of higher-order terms, and the step h in
    lambda."""
    h = log_snr(sigma_next) - log_snr(sigma)
    x0_weight = -(1 - sigma_next) * expm1(-h)
    return x * (sigma_next / sigma) + x0 * x0_weight, x0_weight, h


def _unipc_correct(start: Tensor, x0: Tensor, i: int, sigmas: Sequence[float], history: History) -> Tensor:
    """Repeat the step from i - 1 to i with the x0 predicted at its end, at the order of the first prediction."""
    x0_start = history.x0[-1]
    result, x0_weight, h = _unipc_base(start, x0_start, sigmas[i - 1], sigmas[i])
    if history.order == 1:
        return result + (x0 - x0_start) * (0.5 * x0_weight)
    past = (log_snr(sigmas[i - 2]) - log_snr(sigmas[i - 1])) / h
    # The two conditions of order 2: rho_past + rho_end = b1, past * rho_past + rho_end = b2.
    phi = expm1(-h)
    first = phi / -h - 1
    b1 = first / phi
    b2 = 2 * (first / -h - 0.5) / phi
    rho_past = (b2 - b1) / (past - 1)
    rho_end = b1 - rho_past
    past_term = (history.x0[-2] - x0_start) * (x0_weight * rho_past / past)
    return result + past_term + (x0 - x0_start) * (x0_weight * rho_end)


SOLVERS: dict[str, Solver] = {"unipc": unipc, "dpm++": dpmpp_2m, "euler": euler}

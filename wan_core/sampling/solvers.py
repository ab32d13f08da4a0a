"""Solvers of the flow ODE, each a function of one step.

    x_next, history = solver(x, velocity, i, sigmas, history)

x and velocity are float32 latents of any shape at sigmas[i]; the result is at sigmas[i + 1]. `history` is passed, not
kept: a solver holds no state, and the same call gives the same result. The coefficients are Python floats worked out
in double from the plan's sigmas, so nothing is read back from the device.

In the notation of the papers alpha = 1 - sigma, lambda = log(alpha / sigma), and x0 = x - sigma * velocity is the
video that the model sees behind the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, expm1, inf, log
from typing import NamedTuple

from torch import Tensor


class History(NamedTuple):
    """What a multistep solver remembers: up to two past x0 (newest last), and the sample the last step started from."""

    x0: tuple[Tensor, ...] = ()
    x: Tensor | None = None
    order: int = 0


Solver = Callable[[Tensor, Tensor, int, Sequence[float], History], tuple[Tensor, History]]


def log_snr(sigma: float) -> float:
    """lambda = log((1 - sigma) / sigma): -inf at pure noise, +inf at the video."""
    if sigma <= 0:
        return inf
    return log(1 - sigma) - log(sigma) if sigma < 1 else -inf


def euler(x: Tensor, velocity: Tensor, i: int, sigmas: Sequence[float], history: History) -> tuple[Tensor, History]:
    """x + (sigma_next - sigma) * velocity. What step-distilled models are trained for."""
    return x + velocity * (sigmas[i + 1] - sigmas[i]), history


def dpmpp_2m(x: Tensor, velocity: Tensor, i: int, sigmas: Sequence[float], history: History) -> tuple[Tensor, History]:
    """DPM-Solver++(2M), midpoint, first order on the first and last step. Source: Lu et al. 2022, arXiv:2211.01095."""
    x0 = x - velocity * sigmas[i]
    sigma, following = sigmas[i], sigmas[i + 1]
    h = log_snr(following) - log_snr(sigma)
    pull = (1 - following) * (1 - exp(-h))  # how far towards x0
    result = x * (following / sigma) + x0 * pull
    if history.x0 and following > 0:
        # at sigma 1 the past step is infinitely long in lambda: its slope counts nothing
        ratio = h / (log_snr(sigma) - log_snr(sigmas[i - 1]))
        result = result + (x0 - history.x0[-1]) * (0.5 * pull * ratio)
    return result, History((x0,))


def unipc(x: Tensor, velocity: Tensor, i: int, sigmas: Sequence[float], history: History) -> tuple[Tensor, History]:
    """UniPC of order 2, B(h) = expm1(-h) ("bh2"), predicting x0. Source: Zhao et al. 2023, arXiv:2302.04867.

    The new x0 first corrects the step that led here (UniC), then the next step starts from the corrected sample (UniP).
    """
    x0 = x - velocity * sigmas[i]
    if history.x is not None:
        x = _unipc_correct(history.x, x0, i, sigmas, history)
    order = min(2, len(sigmas) - 1 - i, i + 1)  # lower at both ends
    result, grow, h = _unipc_base(x, x0, sigmas[i], sigmas[i + 1])
    if order == 2:
        past = (log_snr(sigmas[i - 1]) - log_snr(sigmas[i])) / h
        result = result + (history.x0[-1] - x0) * (0.5 * grow / past)
    return result, History((*history.x0[-1:], x0), x, order)


def _unipc_base(x: Tensor, x0: Tensor, sigma: float, following: float) -> tuple[Tensor, float, float]:
    """The exponential-integrator step of first order, the weight of higher terms, and the step h in lambda."""
    h = log_snr(following) - log_snr(sigma)
    grow = -(1 - following) * expm1(-h)
    return x * (following / sigma) + x0 * grow, grow, h


def _unipc_correct(start: Tensor, x0: Tensor, i: int, sigmas: Sequence[float], history: History) -> Tensor:
    """The step from i - 1 to i again, now knowing x0 at its end, at the order it was predicted with."""
    before = history.x0[-1]
    result, grow, h = _unipc_base(start, before, sigmas[i - 1], sigmas[i])
    if history.order == 1:
        return result + (x0 - before) * (0.5 * grow)
    past = (log_snr(sigmas[i - 2]) - log_snr(sigmas[i - 1])) / h
    # the two conditions of order 2: rho_past + rho_end = b1, past * rho_past + rho_end = b2
    phi = expm1(-h)
    first = phi / -h - 1
    b1 = first / phi
    b2 = 2 * (first / -h - 0.5) / phi
    rho_past = (b2 - b1) / (past - 1)
    rho_end = b1 - rho_past
    return result + (history.x0[-2] - before) * (grow * rho_past / past) + (x0 - before) * (grow * rho_end)


SOLVERS: dict[str, Solver] = {"unipc": unipc, "dpm++": dpmpp_2m, "euler": euler}

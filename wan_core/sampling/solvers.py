"""Solvers of the flow ODE, each a function that makes one step.

    x_next, history = solver(x, velocity, i, sigmas, history)

x and velocity are float32 latents of any shape at sigmas[i]; the result is at sigmas[i + 1]. A solver holds no state:
`history` is an argument and a result, so the same call gives the same result. The coefficients are Python floats,
computed in double precision from the plan's sigmas, so nothing is read back from the device. A run that goes on where
another ended passes that one's history, and sigmas that begin with that one's.

In the notation of the papers alpha = 1 - sigma, lambda = log(alpha / sigma), and x0 = x - sigma * velocity is the
model's prediction of the noise-free video.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, expm1, inf, log
from typing import NamedTuple

from torch import Tensor


class History(NamedTuple):
    """State of a solver that needs more than x: up to two past x0 (newest last; of Heun the first velocity), the sample
    at the start of the last step, and that step's order. noise: of this step, for a solver in `NOISY`."""

    x0: tuple[Tensor, ...] = ()
    x: Tensor | None = None
    order: int = 0
    noise: Tensor | None = None


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
    order = 2 if history.x0 and sigmas[i + 1] > 0 else 1  # order 1 at the first and the last step
    result, x0_weight, h = _unipc_base(x, x0, sigmas[i], sigmas[i + 1])
    if order == 2:
        past = (log_snr(sigmas[i - 1]) - log_snr(sigmas[i])) / h
        result = result + (history.x0[-1] - x0) * (0.5 * x0_weight / past)
    return result, History((*history.x0[-1:], x0), x, order)


def heun(x: Tensor, velocity: Tensor, i: int, sigmas: Sequence[float], history: History) -> tuple[Tensor, History]:
    """Heun's method, order 2. A first call makes an Euler step; where that does not end at 0, a second one, with the
    velocity at its end, makes it again with the mean of both. Source: Karras et al. 2022, arXiv:2206.00364."""
    if history.x is not None:
        mean = (history.x0[0] + velocity) / 2
        return history.x + mean * (sigmas[i + 1] - sigmas[i - 1]), History()
    result, _ = euler(x, velocity, i, sigmas, history)
    return result, History((velocity,), x) if sigmas[i + 1] > 0 else History()


def res_multistep(
    x: Tensor, velocity: Tensor, i: int, sigmas: Sequence[float], history: History
) -> tuple[Tensor, History]:
    """RES of order 2, multistep, without noise, order 1 on the first and last step. Its lambda is -log(sigma), as in
    k-diffusion. Source: Zhang et al. 2023, arXiv:2308.02157."""
    x0 = x - velocity * sigmas[i]
    if not history.x0 or sigmas[i + 1] == 0:
        return euler(x, velocity, i, sigmas, history)[0], History((x0,))
    h, past = log(sigmas[i] / sigmas[i + 1]), log(sigmas[i] / sigmas[i - 1])
    first = expm1(-h) / -h
    second = (first - 1) / -h * h / past
    return x * exp(-h) + x0 * (h * (first - second)) + history.x0[-1] * (h * second), History((x0,))


def lcm(x: Tensor, velocity: Tensor, i: int, sigmas: Sequence[float], history: History) -> tuple[Tensor, History]:
    """The predicted video, with new noise up to the next sigma. Source: Luo et al. 2023, arXiv:2310.04378."""
    x0, sigma_next = x - velocity * sigmas[i], sigmas[i + 1]
    if sigma_next == 0:
        return x0, history
    assert history.noise is not None
    return history.noise * sigma_next + x0 * (1 - sigma_next), history


def _unipc_base(x: Tensor, x0: Tensor, sigma: float, sigma_next: float) -> tuple[Tensor, float, float]:
    """The first-order exponential-integrator step, weights of x0 and of higher-order terms, the step h in lambda."""
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


SOLVERS: dict[str, Solver] = {
    "unipc": unipc,
    "dpm++": dpmpp_2m,
    "euler": euler,
    "heun": heun,
    "res_multistep": res_multistep,
    "lcm": lcm,
}
NOISY = ("lcm",)  # each step but the last adds noise of its own

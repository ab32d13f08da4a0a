"""Solvers against diffusers' flow schedulers over whole trajectories, and their order of convergence on a known
flow."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from wan_core.sampling.plan import make_plan
from wan_core.sampling.solvers import SOLVERS, History

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword"
)  # diffusers' own


def trajectory(solver: str, sigmas, velocity, x):
    """Every latent our solver visits."""
    history, visited = History(), []
    for i in range(len(sigmas) - 1):
        x, history = SOLVERS[solver](x, velocity(x, sigmas[i]), i, sigmas, history)
        visited.append(x)
    return visited


def curved(x, sigma):
    """A velocity field that is neither constant nor linear, so that every term of a solver counts."""
    return torch.tanh(x * (0.5 + sigma)) + 0.3 * x.roll(1, -1) - 0.5 * sigma


def set_sigmas(scheduler, sigmas):
    """Give a diffusers scheduler exactly these sigmas: what is compared is the solver, not the schedule."""
    scheduler.set_timesteps(len(sigmas) - 1)
    scheduler.sigmas = torch.tensor(sigmas, dtype=torch.float32)
    scheduler.timesteps = torch.tensor(np.array(sigmas[:-1]) * 1000)
    return scheduler


THEIRS = {
    "unipc": lambda: UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, solver_order=2, solver_type="bh2", flow_shift=5.0
    ),
    "dpm++": lambda: DPMSolverMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        solver_order=2,
        algorithm_type="dpmsolver++",
        flow_shift=5.0,
    ),
    "euler": lambda: FlowMatchEulerDiscreteScheduler(shift=5.0),
}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(
    ("steps", "shift"), [(1, 5.0), (2, 5.0), (4, 12.0), (9, 3.0), (20, 5.0), (40, 12.0), (50, 5.0)]
)
def test_matches_diffusers_over_the_trajectory(solver, steps, shift):
    sigmas = make_plan(task="t2v-A14B", steps=steps, shift=shift, solver=solver).sigmas
    x = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(steps))
    scheduler, theirs = set_sigmas(THEIRS[solver](), sigmas), x
    for i, (ours, t) in enumerate(zip(trajectory(solver, sigmas, curved, x), scheduler.timesteps, strict=True)):
        theirs = scheduler.step(curved(theirs, sigmas[i]), t, theirs, return_dict=False)[0]
        assert (ours - theirs).abs().max() <= 1e-5, f"step {i}"


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("dpm++", 2), ("unipc", 2)])
def test_order_of_convergence(solver, order):
    """The flow to a Gaussian of width 0.5 has the closed form x(sigma) = x(1) * std(sigma) / std(1): halving the
    steps must shrink the error by 2^order. Double precision, from sigma 0.9 to 0.1, where lambda is smooth."""

    def std(sigma):
        return ((0.5 * (1 - sigma)) ** 2 + sigma**2) ** 0.5

    def velocity(x, sigma):
        return x * (sigma - 0.25 * (1 - sigma)) / std(sigma) ** 2

    x = torch.ones(1, dtype=torch.float64)
    errors = []
    for steps in (16, 32, 64):
        sigmas = np.linspace(0.9, 0.1, steps + 1).tolist()
        final = trajectory(solver, sigmas, velocity, x)[-1]
        errors.append(abs(final.item() - std(0.1) / std(0.9)))
    assert errors[0] / errors[1] > 2**order * 0.8 and errors[1] / errors[2] > 2**order * 0.8, errors


def test_steps_are_pure():
    """The same call twice gives the same result: nothing is kept between calls or changed in place."""
    sigmas = make_plan(steps=6).sigmas
    for solver in SOLVERS.values():
        x, history = torch.ones(4), History()
        for i in range(6):
            before = x.clone()
            first, kept = solver(x, curved(x, sigmas[i]), i, sigmas, history)
            again, _ = solver(x, curved(x, sigmas[i]), i, sigmas, history)
            assert torch.equal(first, again) and torch.equal(x, before)
            x, history = first, kept

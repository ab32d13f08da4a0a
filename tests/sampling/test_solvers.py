"""Solvers against diffusers' flow schedulers and k-diffusion's arithmetic over whole trajectories, and their order of
convergence on a known flow."""

from __future__ import annotations

import subprocess
from itertools import pairwise

import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from tests.comfyui import find_comfyui, python_of
from wan_core.sampling.plan import make_plan
from wan_core.sampling.solvers import NOISY, SOLVERS, History

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword"
)  # diffusers' own


def trajectory(solver: str, sigmas, velocity, x, noise=()):
    """Every latent our solver visits. noise: for each step."""
    history, visited = History(), []
    for i in range(len(sigmas) - 1):
        history = history._replace(noise=noise[i]) if noise else history
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


@pytest.mark.parametrize("solver", THEIRS)
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


def k_heun(denoised, x, sigmas, noise):
    """Algorithm 2 of Karras et al. without churn: denoised(x, sigma), and an Euler last step."""
    for sigma, end in pairwise(sigmas):
        slope = (x - denoised(x, sigma)) / sigma
        guess = x + slope * (end - sigma)
        if end > 0:
            guess = x + (slope + (guess - denoised(guess, end)) / end) / 2 * (end - sigma)
        x = guess
    return x


def k_res_multistep(denoised, x, sigmas, noise):
    """Zhang et al.'s exponential integrator in t = -log(sigma), coefficients from the integral over the line through
    the last two predictions."""
    old = None
    for i, (sigma, end) in enumerate(pairwise(sigmas)):
        now = denoised(x, sigma)
        if old is None or end == 0:
            x = x + (x - now) / sigma * (end - sigma)
        else:
            h, back = np.log(sigma / end), np.log(sigmas[i - 1] / sigma)
            # e^-h x + int_0^h e^(s - h) (now + (now - old) s / back) ds
            constant, line = 1 - np.exp(-h), h - 1 + np.exp(-h)
            x = np.exp(-h) * x + constant * now + line / back * (now - old)
        old = now
    return x


def k_lcm(denoised, x, sigmas, noise):
    for i, (sigma, end) in enumerate(pairwise(sigmas)):
        x = denoised(x, sigma)
        if end > 0:
            x = end * noise[i] + (1 - end) * x
    return x


K_DIFFUSION = {"heun": k_heun, "res_multistep": k_res_multistep, "lcm": k_lcm}


def ours(solver, steps, shift, velocity, x, noise):
    plan = make_plan(steps=steps, shift=shift, solver=solver)
    return trajectory(solver, plan.sigmas, velocity, x, noise if solver in NOISY else ())[-1]


def drawn(steps):
    generator = torch.Generator().manual_seed(steps)
    return torch.randn(steps + 1, 2, 3, 4, 8, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("solver", K_DIFFUSION)
@pytest.mark.parametrize(("steps", "shift"), [(1, 5.0), (2, 5.0), (4, 12.0), (9, 3.0), (40, 12.0)])
def test_matches_the_arithmetic_of_k_diffusion(solver, steps, shift):
    x, *noise = drawn(steps)
    sigmas = make_plan(steps=steps, shift=shift, solver="euler").sigmas
    wanted = K_DIFFUSION[solver](lambda x, sigma: x - curved(x, sigma) * sigma, x, sigmas, noise)
    assert (ours(solver, steps, shift, curved, x, noise) - wanted).abs().max() <= 1e-9


REFERENCE = """
import sys
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[:1] + ["--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import torch
from comfy.k_diffusion import sampling
from comfy.model_sampling import CONST

cases = torch.load("cases.pt")

class Model:
    patcher = SimpleNamespace(get_model_object=lambda name: CONST())
    inner_model = SimpleNamespace(model_patcher=patcher)
    def __call__(self, x, sigma):
        sigma = sigma.view(-1, 1, 1, 1)
        velocity = torch.tanh(x * (0.5 + sigma)) + 0.3 * x.roll(1, -1) - 0.5 * sigma
        return CONST().calculate_denoised(sigma, velocity, x)

found = []
for name, x, sigmas, noise in cases:
    steps = iter(noise)
    options = {} if name == "heun" else {"noise_sampler": lambda *_: next(steps)}
    found.append(getattr(sampling, "sample_" + name)(Model(), x, sigmas, disable=True, **options))
torch.save(found, "found.pt")
"""


@pytest.mark.comfy
def test_matches_the_k_diffusion_of_comfyui(tmp_path):
    """Its functions themselves, with its model sampling of flows."""
    checkout, cases = (
        find_comfyui(),
        [(s, n, shift) for s in K_DIFFUSION for n, shift in ((2, 5.0), (4, 5.0), (20, 8.0))],
    )
    inputs = []
    for solver, steps, shift in cases:
        x, *noise = drawn(steps)
        sigmas = torch.tensor(make_plan(steps=steps, shift=shift, solver="euler").sigmas, dtype=torch.float64)
        inputs.append((solver, x, sigmas, noise))
    torch.save(inputs, tmp_path / "cases.pt")
    command = [python_of(checkout), "-c", REFERENCE, str(checkout)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=240, capture_output=True)
    for case, (solver, x, _, noise), wanted in zip(cases, inputs, torch.load(tmp_path / "found.pt"), strict=True):
        assert (ours(solver, *case[1:], curved, x, noise) - wanted).abs().max() <= 1e-9, case


@pytest.mark.parametrize(
    ("solver", "order"), [("euler", 1), ("dpm++", 2), ("unipc", 2), ("heun", 2), ("res_multistep", 2)]
)
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
        if solver == "heun":  # each step twice, the second time at its end
            sigmas = [sigmas[0], *(sigma for sigma in sigmas[1:] for _ in range(2))]
        final = trajectory(solver, sigmas, velocity, x)[-1]
        errors.append(abs(final.item() - std(0.1) / std(0.9)))
    assert errors[0] / errors[1] > 2**order * 0.8 and errors[1] / errors[2] > 2**order * 0.8, errors

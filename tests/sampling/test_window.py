"""Parts of a schedule: video to video by strength, and runs that end where another begins."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.sampling.test_denoise import EXPERTS, TEXT, small_dit
from wan_core.config import OptionError, SkipOptions, TaylorSeerOptions
from wan_core.config.skipping import parse_setting
from wan_core.execution.report import Report
from wan_core.models.vae.config import VAE_21, VAE_22
from wan_core.pipeline.denoise import sample_latents
from wan_core.sampling.cache.residual import BOTH, residual_program
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.denoise import Ready
from wan_core.sampling.plan import SCHEDULES, cut_plan, make_plan
from wan_core.sampling.schedules import Window
from wan_core.sampling.solvers import SOLVERS
from wan_core.sampling.start import Leftover, Start
from wan_core.workers.wire import pack, unpack

CPU = torch.device("cpu")
SHAPE = (1, 16, 3, 4, 6)
VIDEO = draw_noise(11, SHAPE)
SINGLE = ("euler", "heun", "lcm")  # solvers that keep nothing from one step to the next


def part(solver="euler", steps=6, *, skip=None, **window):
    plan = make_plan(steps=steps, solver=solver, guidance_high=2.0, guidance_low=1.0, window=Window(**window))
    return skip_forwards(plan, skip, None)


def sample(plan, start, conditioning=TEXT, experts=EXPERTS, vae=VAE_21):
    """Un-normalised latents, and what is left over."""
    start.check(plan)
    leftovers: list[Leftover] = []
    x = start.sample(plan, vae, CPU)
    acquire = experts.__getitem__
    latents = sample_latents(
        plan, Ready(acquire), conditioning, x, vae, Report(CPU), start=start, on_leftover=leftovers.append
    )
    return latents, leftovers[0] if leftovers else None


@settings(max_examples=15)
@given(solver=st.sampled_from(sorted(SOLVERS)), steps=st.integers(2, 7), data=st.data())
def test_two_runs_in_a_row_are_one_run_bit_for_bit(solver, steps, data):
    """Every solver, wherever it is cut, with the change of expert and guidance before, at or after the cut."""
    cut = data.draw(st.integers(1, steps - 1))
    whole, none = sample(part(solver, steps), Start(shape=SHAPE, seed=3))
    first, leftover = sample(part(solver, steps, end=cut, leftover=True), Start(shape=SHAPE, seed=3))
    assert none is None and leftover is not None
    # as it travels to workers and back
    tensors: dict[str, torch.Tensor] = {}
    leftover = unpack(Leftover, pack(leftover, tensors, "left"), tensors)
    going_on = Start(shape=SHAPE, seed=3, add_noise=False, latents=first, leftover=leftover)
    second, none = sample(part(solver, steps, start=cut), going_on)
    assert none is None and torch.equal(second, whole)


@pytest.mark.parametrize("solver", SOLVERS)
def test_through_latents_alone_solvers_of_single_steps_go_on_but_for_rounding(solver):
    """Latents saved to a file are x / (1 - sigma), as ComfyUI's samplers leave them. Solvers of several
    steps begin anew, which is another result."""
    whole, _ = sample(part(solver), Start(shape=SHAPE, seed=3))
    first, leftover = sample(part(solver, end=3, leftover=True), Start(shape=SHAPE, seed=3))
    torch.testing.assert_close(VAE_21.normalise(first) * (1 - leftover.sigma), leftover.x)
    second, _ = sample(part(solver, start=3), Start(shape=SHAPE, seed=3, add_noise=False, latents=first))
    assert ((second - whole).abs().max() < 1e-4) == (solver in SINGLE)


@pytest.mark.parametrize("solver", SCHEDULES)
@pytest.mark.parametrize("denoise", [0.2, 0.35, 0.5, 0.8, 0.99, 1.0])
def test_a_strength_runs_the_last_steps_of_a_longer_schedule(solver, denoise):
    plan, longer = part(solver, 6, denoise=denoise), make_plan(steps=int(6 / denoise), solver=solver)
    assert plan.count == 6 and plan.sigmas == longer.sigmas[-len(plan.sigmas) :]
    assert plan.before + plan.sigmas == longer.sigmas and plan.from_latents == (denoise < 0.86)


@pytest.mark.parametrize("denoise", [0.2, 0.4, 0.6, 0.8])
def test_video_to_video_is_the_flow_from_noised_latents(denoise):
    """And a weaker one stays nearer to its video."""
    plan = part(denoise=denoise)
    latents, _ = sample(plan, Start(shape=SHAPE, seed=5, latents=VIDEO))
    x, sigma = VAE_21.normalise(VIDEO), plan.sigmas[0]
    x = (1 - sigma) * x + sigma * draw_noise(5, SHAPE)
    for step in plan.steps:
        model, t = EXPERTS[step.expert], torch.full((1,), step.timestep)
        cond = model(x, t, TEXT.cond)
        velocity = cond
        if step.guidance != 1:
            uncond = model(x, t, TEXT.uncond)
            velocity = uncond + step.guidance * (cond - uncond)
        x = x + velocity * (step.sigma_next - step.sigma)
    torch.testing.assert_close(VAE_21.normalise(latents), x, rtol=1e-4, atol=1e-4)


def test_an_early_end_without_leftover_noise_removes_all_of_it():
    for solver in SOLVERS:
        plan = part(solver, 6, end=4)
        assert plan.sigmas[-1] == 0 and plan.sigmas[:-1] == part(solver, 6).sigmas[: len(plan.sigmas) - 1]
        assert sample(plan, Start(shape=SHAPE, seed=1))[1] is None
        assert part(solver, 6, end=4, leftover=True).sigmas[-1] == part(solver, 6, start=4).sigmas[0]


@pytest.mark.parametrize("setting", ["taylorseer:2/0.1", "magcache:0.24/2/0.1"])
@pytest.mark.parametrize("steps", [10, 13, 20])
def test_the_step_that_removes_the_noise_of_an_early_end_is_computed(setting, steps):
    for end in range(1, steps):
        last = part(steps=steps, skip=parse_setting(setting), end=end).steps[-1]
        assert last.finishes and (last.action, last.skipped) == ("compute", ())


@settings(max_examples=20)
@given(
    taylorseer=st.none() | st.builds(TaylorSeerOptions, interval=st.integers(1, 4)),
    bounds=st.tuples(st.integers(0, 19), st.integers(1, 20)),
)
def test_what_is_skipped_has_its_sources_inside_the_window(taylorseer, bounds):
    start, end = bounds
    assume(start < end)
    skip = SkipOptions(taylorseer=taylorseer)
    whole, plan = part(steps=20, skip=skip), part(steps=20, skip=skip, start=start, end=end, leftover=True)
    assert [step.index for step in plan.steps] == list(range(end - start))
    for step, of_whole in zip(plan.steps, whole.steps[start:end], strict=True):
        assert replace(step, index=0).sigma == of_whole.sigma and set(step.skipped) <= set(of_whole.skipped)
    for phase in plan.phases:
        for branch in BOTH:
            residual_program(phase, branch)  # asserts that there is something to reuse
    assert plan.unskipped == sum(len(s.branches) for s in part(steps=20, start=start, end=end, leftover=True).steps)
    # from the first step that computes again, the window does what the whole run does
    if start == 0:
        assert plan.steps == whole.steps[:end]


def test_a_run_in_two_parts_that_skips_runs():
    skip = SkipOptions(taylorseer=TaylorSeerOptions(interval=3))
    first, leftover = sample(part(steps=12, skip=skip, end=7, leftover=True), Start(shape=SHAPE, seed=3))
    going_on = Start(shape=SHAPE, seed=3, add_noise=False, latents=first, leftover=leftover)
    assert sample(part(steps=12, skip=skip, start=7), going_on)[0].isfinite().all()


def test_known_frames_have_no_noise_left_over():
    model, shape = small_dit(48, 48), (1, 48, 4, 4, 4)
    known_latents = draw_noise(3, (1, 48, 2, 4, 4))
    conditioning = Conditioning(cond=TEXT.cond, uncond=TEXT.uncond, known=known_latents)
    plan = [
        make_plan(task="ti2v-5B", steps=4, solver="euler", window=w)
        for w in (None, Window(end=2, leftover=True), Window(start=2))
    ]
    setup = {"conditioning": conditioning, "experts": {"high": model}, "vae": VAE_22}
    whole, _ = sample(plan[0], Start(shape=shape, seed=3), **setup)
    first, leftover = sample(cut_plan(plan[1]), Start(shape=shape, seed=3), **setup)
    torch.testing.assert_close(VAE_22.normalise(first)[:, :, :2], known_latents)
    going_on = Start(shape=shape, seed=3, add_noise=False, latents=first, leftover=leftover)
    assert torch.equal(sample(cut_plan(plan[2]), going_on, **setup)[0], whole)
    apart = replace(going_on, leftover=None)
    torch.testing.assert_close(sample(cut_plan(plan[2]), apart, **setup)[0], whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"sigmas": [1.0]}, "at least two"),
        ({"sigmas": [14.6, 3.0, 0.0]}, "from 1 to 0"),
        ({"sigmas": [1.0, 0.5, 0.5, 0.0]}, "below the one before"),
        ({"sigmas": [1.0, 0.5, 0.0], "steps": 3}, "leave the steps out"),
        ({"sigmas": [1.0, 0.5, 0.0], "window": Window(denoise=0.5)}, "leave denoise"),
        ({"steps": 600, "window": Window(denoise=0.5)}, "larger denoise"),
        ({"steps": 6, "window": Window(start=6)}, "start earlier"),
    ],
)
def test_parts_and_sigmas_that_cannot_be(bad, message):
    with pytest.raises(OptionError, match=message):
        make_plan(**bad)


@pytest.mark.parametrize("solver", ["heun", "lcm"])
def test_solvers_that_do_not_fit_a_cache_are_refused_by_name(solver):
    with pytest.raises(OptionError, match=f"does not fit the solver {solver}"):
        part(solver, 20, skip=SkipOptions(taylorseer=TaylorSeerOptions(interval=2)))


@given(
    seed=st.integers(0, 5) | st.integers(2**64 - 3, 2**64 - 1),
    bounds=st.tuples(st.integers(0, 5), st.integers(1, 6)),
    drawn=st.lists(st.integers(1, 4), max_size=2),
)
def test_noise_of_a_step_comes_from_the_seed_after_the_run_s(seed, bounds, drawn):
    """ComfyUI draws the noise of each step of the whole schedule in turn, after the steps of earlier clips."""
    assume(bounds[0] < bounds[1])
    plan, steps = part("lcm", 6, start=bounds[0], end=bounds[1], leftover=True), []
    earlier = tuple((1, 16, frames, 2, 2) for frames in drawn)
    draw = Start(shape=SHAPE, seed=seed, drawn=earlier).step_noise(plan, CPU)
    generator = torch.Generator().manual_seed(0 if seed == 2**64 - 1 else seed + 1)
    for shape in earlier:
        for _ in range(bounds[1]):
            torch.randn(shape, generator=generator)
    for _ in range(bounds[1]):
        steps.append(torch.randn(SHAPE, generator=generator))
    for wanted in steps[bounds[0] :]:
        assert torch.equal(draw(), wanted)


def test_noise_of_a_batch_as_comfyui_numbers_it():
    one_by_one = [draw_noise(9, SHAPE), *(draw_noise(9, (1 + n, *SHAPE[1:]))[-1:] for n in (1, 2))]
    drawn = draw_noise(9, (4, *SHAPE[1:]), (2, 0, 2, 1))
    generator = torch.Generator().manual_seed(9)
    wanted = [torch.randn(SHAPE, generator=generator) for _ in range(3)]
    assert torch.equal(drawn, torch.cat([wanted[n] for n in (2, 0, 2, 1)]))
    assert torch.equal(one_by_one[0], wanted[0])


def test_heun_s_second_forward_is_a_step_of_the_plan():
    plan = make_plan(steps=4, shift=5, solver="heun", boundary=0.875)
    pairs = [(round(s.timestep, 1), s.expert, s.correction) for s in plan.steps]
    high, low = [("high", False), ("high", True)], [("low", False), ("low", True)]
    times = [1000.0, 937.5, 937.5, 833.3, 833.3, 625.0, 625.0]
    kinds = [*high, high[0], low[1], low[0], low[1], low[0]]
    assert pairs == [(time, *kind) for time, kind in zip(times, kinds, strict=True)]
    assert plan.count == 4 and plan.forwards == 14 and len(plan.phases) == 2
    assert [plan.number(step) for step in plan.steps] == [1, 1, 2, 2, 3, 3, 4]
    assert plan.estimate({"high": 1.0, "low": 2.0}) == 3 * 2 + 4 * 2 * 2.0
    assert plan.table().startswith("t2v-A14B: 4 steps, heun") and "correction" in plan.table()

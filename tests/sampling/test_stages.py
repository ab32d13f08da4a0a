"""The resolution schedule: what the plan says, the mathematics of a change of size, and runs that have one."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.sampling.test_denoise import EXPERTS, TEXT, run, small_dit
from tests.sampling.test_sparse_plan import A14B
from tests.sampling.test_window import sample
from wan_core.cli import main
from wan_core.config import OptionError, Request, SkipOptions, StageOptions
from wan_core.models.wan.families import FAMILIES, check_stages
from wan_core.models.wan.rope import rope_table
from wan_core.parallel.chords import check_chords
from wan_core.sampling.cache.arguments import parse_setting
from wan_core.sampling.cache.residual import BOTH, residual_program
from wan_core.sampling.cache.skipping import skip_forwards, skip_words
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.plan import SCHEDULES, Plan, make_plan
from wan_core.sampling.plan_drawing import draw_plan
from wan_core.sampling.resolution import Resolution, mean_over_areas
from wan_core.sampling.schedules import Window, shifted
from wan_core.sampling.solvers import SOLVERS
from wan_core.sampling.sparsity.schedule import attention_share, step_tokens, with_costs
from wan_core.sampling.stages import parse_stages, runs, smaller, stage_words
from wan_core.sampling.start import Leftover, Start
from wan_core.workers.wire import pack, unpack

NOISE = draw_noise(7, (1, 16, 3, 8, 12))
STAGES = (StageOptions(scale=0.5, low=0.7, high=0.95),)


def staged(stages=STAGES, *, skip=None, **options):
    options = {"steps": 8, "solver": "euler", "guidance_high": 2.0, "guidance_low": 1.0, **options}
    return skip_forwards(make_plan(**options), replace(skip or SkipOptions(), stages=stages), None)


@st.composite
def stage_options(draw):
    """One to three stages that do not overlap and leave the last steps alone."""
    edges = sorted(draw(st.lists(st.floats(0.4, 1), min_size=2, max_size=6, unique=True)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))
    every = draw(st.sampled_from([0, 0, 2, 3]))
    scales = draw(st.lists(st.sampled_from([0.25, 0.5, 2 / 3, 0.75, 1.0]), min_size=len(pairs), max_size=len(pairs)))
    stages = zip(scales, pairs, strict=True)
    return tuple(StageOptions(scale=s, low=low, high=high, every=every) for s, (low, high) in stages)


# ------------------------------------------------------------------------------------------------------------- the plan


@settings(max_examples=60)
@given(stages=stage_options(), steps=st.integers(3, 40), solver=st.sampled_from(sorted(SCHEDULES)), data=st.data())
def test_a_plan_says_every_size(stages, steps, solver, data):
    """Deterministic, printable, the same after a journey to workers; tokens, timesteps and the estimate follow."""
    numbers = {"steps": steps, "solver": solver, "shift": data.draw(st.sampled_from([3.0, 5.0, 12.0]))}
    plain = make_plan(**numbers)
    assume(plain.steps[-1].sigma < 0.4)
    plan = staged(stages, guidance_high=None, guidance_low=None, **numbers)
    assert plan == staged(stages, guidance_high=None, guidance_low=None, **numbers)
    assert (unpack(Plan, json.loads(json.dumps(asdict(plan)))) == plan and "of the size" in plan.table()) or all(
        step.scale == 1 for step in plan.steps
    )
    latents = (data.draw(st.integers(1, 21)), 2 * data.draw(st.integers(2, 45)), 2 * data.draw(st.integers(2, 80)))
    costed = with_costs(plan, A14B, latents)
    inside = [0] * len(stages)
    for before, step in zip(plain.steps, costed.steps, strict=True):
        number = next((n for n, s in enumerate(stages) if s.low <= before.sigma <= s.high), None)
        wanted = 1.0
        if number is not None and not step.correction:
            inside[number] += 1
            every = stages[number].every
            wanted = 1.0 if every and inside[number] % every == 0 else stages[number].scale
        assert step.scale == (costed.steps[step.index - 1].scale if step.correction else wanted)
        assert (step.sigma, step.sigma_next, step.expert) == (before.sigma, before.sigma_next, before.expert)
        assert (step.timestep, step.cost) == (before.timestep, 1) if step.scale == 1 else step.cost <= 1
        assert before.timestep >= step.timestep >= (875 if step.expert == "high" else 0)
        rows, columns = smaller(latents[1:], step.scale, (2, 2))
        assert step_tokens(step, A14B, latents) == latents[0] * rows * columns // 4
    assert costed.steps[-1].scale == 1 and sum(map(len, runs(costed.steps))) == len(plan.steps)
    seconds = costed.estimate({"high": 1.0, "low": 1.0})
    assert seconds == pytest.approx(sum(step.forwards * step.cost for step in costed.steps))


def test_the_cost_of_a_smaller_step_is_that_of_its_tokens():
    """At half the size 18,480 of 75,600 tokens: a quarter of the linears, and the square of it of attention."""
    plan = with_costs(staged(), A14B, (21, 90, 160))
    step = next(step for step in plan.steps if step.scale == 0.5)
    share, tokens = attention_share(A14B, 75600), step_tokens(step, A14B, (21, 90, 160)) / 75600
    assert tokens == 18480 / 75600
    assert step.cost == pytest.approx(share * tokens**2 + (1 - share) * tokens, abs=1e-4)


def test_a_smaller_step_reads_as_many_keys_as_one_at_full_size():
    """12.5 % of the keys are half of those at half the size, and all of them where there are so few."""
    plan = staged(parse_stages("0.5/0.8-0.97,0.25/0.6-0.75"), skip=parse_setting("sparse:0.875/0:ramp0"), shift=5.0)
    assert {(step.scale, step.sparsity) for step in plan.steps} == {(1.0, 0.875), (0.5, 0.5), (0.25, 0.0)}


@settings(max_examples=40)
@given(stages=stage_options(), steps=st.integers(10, 40), cut=st.integers(0, 9))
def test_nothing_is_reused_at_another_size(stages, steps, cut):
    """Neither a residual nor the difference of the branches, in whole runs and in parts."""
    options = {"shift": 5.0, "guidance_low": 3.0, "window": Window(start=cut, leftover=True)}
    assume(make_plan(steps=steps).steps[-1].sigma < 0.4)
    skip = replace(parse_setting("taylorseer:3/2+every:3"), stages=stages)
    plan = staged(stages, skip=skip, steps=steps, **options)
    for phase in plan.phases:
        for run_of_one_size in runs(phase):
            for branch in BOTH:
                residual_program(run_of_one_size, branch)  # asserts that what is used was computed
            guided = [step for step in run_of_one_size if step.delta or "uncond" in step.branches]
            assert not guided or not guided[0].delta


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse_stages("0.5"), "stages '0.5' given; write scale/low sigma-high sigma"),
        (lambda: parse_stages("0.5/0.9-0.98:every"), "write scale/low"),
        (lambda: parse_stages("0.5/0.9-0.98:every2:every3"), "write scale/low"),
        (lambda: parse_stages("0.5/0.9-0.98:every1"), "every 1 given for a stage"),
        (lambda: parse_stages("0.5/0.9-0.98:other"), "write scale/low"),
        (lambda: parse_stages("0.1/0.9-0.98"), "scale of a stage 0.1 given"),
        (lambda: parse_stages("0.5/0.98-0.9"), "stage from sigma 0.98 to 0.9 given"),
        (lambda: parse_stages("0.5/0-0.9"), "stage from sigma 0 to 0.9 given"),
        (lambda: SkipOptions(stages=parse_stages("0.5/0.8-0.9,0.75/0.85-0.95")), "overlap"),
        (lambda: staged(parse_stages("0.5/0.01-0.9")), "the last step, at sigma .* would run at 0.5 of the size"),
        (lambda: staged(window=Window(end=6)), "the last step, at sigma .* would run at 0.5 of the size"),
        (lambda: check_chords(staged(), 2), "leave the resolution schedule out"),
        (lambda: check_stages(FAMILIES["vace"].tasks[0]), "it is for models of the family wan"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(OptionError, match=message):
        make()


def test_a_part_of_a_run_says_whose_steps_its_notes_number():
    whole, part = staged(), staged(window=Window(start=4))
    assert part.notes[:-1] == whole.notes and "this run begins at its step 4" in part.notes[-1]


def test_the_command_plan_refuses_what_the_run_refuses(capsys):
    assert main(["plan", "--task", "vace-14B", "--stages", "0.5/0.9-0.98"]) != 0
    assert "it is for models of the family wan" in capsys.readouterr().err


def test_options_travel_and_are_said():
    options = parse_setting("stages:0.75/0.7-0.9:every3:own,0.5/0.9-0.98+every:2")
    assert [stage.scale for stage in options.stages] == [0.5, 0.75], "by falling sigma"
    assert [stage.positions for stage in options.stages] == ["video", "own"]
    assert [stage.every for stage in options.stages] == [0, 3]
    assert parse_stages(stage_words(options.stages)) == options.stages and "stages 0.5/" in skip_words(options)
    request = Request(prompt="a", skip=options)
    assert unpack(Request, json.loads(json.dumps(asdict(request)))) == request
    assert draw_plan(staged(), 3.0).size == (960, 540)


# ---------------------------------------------------------------------------------------------------------- mathematics


@settings(max_examples=60)
@given(large=st.integers(1, 40), data=st.data())
def test_white_noise_stays_white_and_a_constant_stays_one(large, data):
    """Orthonormal rows: the covariance of white noise after them is the identity, at every ratio of sizes."""
    small = data.draw(st.integers(max(1, large // 4), large))
    rows = mean_over_areas(small, large).double()
    torch.testing.assert_close(rows @ rows.T, torch.eye(small, dtype=torch.float64), rtol=0, atol=1e-5)
    wanted = torch.full((small,), math.sqrt(large / small), dtype=torch.float64)
    torch.testing.assert_close(rows.sum(1), wanted, rtol=1e-5, atol=0)
    if large % small == 0:  # the plain mean
        assert ((rows > 1e-6).sum(1) == large // small).all()


@settings(max_examples=30)
@given(rows=st.integers(2, 10), columns=st.integers(2, 10), scale=st.sampled_from([0.5, 2 / 3, 0.75]), data=st.data())
def test_the_model_sees_the_smaller_video_at_the_sigma_that_it_is_told(rows, columns, scale, data):
    """x = (1 - sigma) * video + sigma * noise, and the same at the smaller size with the sigma of the timestep, but for
    the rounding of sizes to whole tokens. A right velocity there gives the low frequencies of the right one here, and
    the noise of the run stays what it is."""
    shape, sigma = (1, 4, 2, 2 * rows, 2 * columns), data.draw(st.floats(0.3, 1.0))
    video, noise = torch.randn(shape), torch.randn(shape)
    x = (1 - sigma) * video + sigma * noise
    plan = staged((StageOptions(scale=scale, low=0.7, high=0.95),))
    step = replace(next(s for s in plan.steps if s.scale != 1), sigma=sigma)
    resolution = Resolution(plan, TEXT, video)
    size, _ = resolution.of(step, x, (2, 2))
    small, sample_, seen = size.down(video) / size.ratio, size.sample(x, sigma), shifted(sigma, 1 / size.ratio)
    torch.testing.assert_close(sample_, (1 - seen) * small + seen * size.down(noise), rtol=1e-4, atol=1e-4)
    velocity = resolution.whole(x, sample_, size.down(noise) - small, step, size)
    torch.testing.assert_close(velocity, noise - video, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(resolution.video, video, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scale", [0.5, 2 / 3, 0.75])
def test_a_run_that_begins_small_goes_on_with_white_noise(scale):
    """Before any prediction at full size: what is not of the predicted video is the noise of the seed, white and of
    variance 1, where the video has no details that the smaller size lacks."""
    noise, plan = draw_noise(3, (1, 16, 4, 24, 40)), staged((StageOptions(scale=scale, low=0.7),), shift=5.0)
    resolution, x = Resolution(plan, TEXT), noise
    for step in plan.steps:
        size, _ = resolution.of(step, x, (2, 2))
        if size is None:
            break
        small = draw_noise(5, (1, 16, 4, size.rows.shape[0], size.columns.shape[0]))
        seen = shifted(step.sigma, 1 / size.ratio)
        sample_ = size.sample(x, step.sigma)
        predicted = (sample_ - small) / seen  # the velocity of a model that predicts `small`
        x = x + resolution.whole(x, sample_, predicted, step, size) * (step.sigma_next - step.sigma)
    size = resolution.sizes[scale][0]
    video = size.up(small) * size.ratio
    remaining = (x - (1 - step.sigma) * video) / step.sigma
    torch.testing.assert_close(remaining, noise, rtol=1e-3, atol=1e-3)
    assert abs(float(remaining.std()) - 1) < 0.02
    for axis in (3, 4):
        near = (
            remaining.narrow(axis, 0, remaining.shape[axis] - 1) * remaining.narrow(axis, 1, remaining.shape[axis] - 1)
        ).mean()
        assert abs(float(near)) < 0.02


def test_positions_of_a_smaller_grid_are_the_middle_of_what_it_stands_for():
    """Half the rows and columns: 0.5, 2.5, 4.5, ... of those of the video; other spacings give other tables."""
    model = small_dit()
    table = model.rope((1, 2, 3), torch.device("cpu"), (2.0, 2.0)).unflatten(0, (2, 3))
    fine = rope_table((1, 4, 6), model.config.rope_axes, spacing=(1, 0.5, 0.5)).unflatten(0, (4, 6))
    assert torch.equal(model.rope((1, 2, 3), torch.device("cpu")), rope_table((1, 2, 3), model.config.rope_axes))
    rows = rope_table((1, 8, 12), model.config.rope_axes, spacing=(1, 0.5, 0.5)).unflatten(0, (8, 12))
    torch.testing.assert_close(table, rows[1::4, 1::4][:2, :3])
    assert fine.shape == (4, 6, *table.shape[2:])


# ------------------------------------------------------------------------------------------------------------- the runs


@settings(max_examples=12)
@given(solver=st.sampled_from(sorted(SOLVERS)), steps=st.integers(3, 7), data=st.data())
def test_full_size_everywhere_is_the_run_without_stages_bit_for_bit(solver, steps, data):
    plain = make_plan(steps=steps, solver=solver, guidance_high=2.0, guidance_low=1.0)
    low = data.draw(st.floats(0.01, 0.9))
    full = staged((StageOptions(scale=1, low=low),), steps=steps, solver=solver)
    assert [replace(step, scale=1.0) for step in full.steps] == list(plain.steps)
    noises = [iter(draw_noise(9, (9, *NOISE.shape))) for _ in range(2)]
    latents = [run(p, noise=NOISE, step_noise=lambda n=n: next(n)) for p, n in zip((plain, full), noises, strict=True)]
    assert torch.equal(*latents)


@settings(max_examples=12)
@given(solver=st.sampled_from(sorted(SOLVERS)), steps=st.integers(4, 8), data=st.data())
def test_two_runs_in_a_row_are_one_run_bit_for_bit(solver, steps, data):
    """Wherever it is cut, before, inside or after a stage: the last prediction goes with what is left over."""
    cut, shape = data.draw(st.integers(1, steps - 1)), tuple(NOISE.shape)

    def part(**window):
        return staged(steps=steps, solver=solver, shift=5.0, window=Window(**window))

    whole, _ = sample(part(), Start(shape=shape, seed=3))
    first, leftover = sample(part(end=cut, leftover=True), Start(shape=shape, seed=3))
    tensors: dict[str, torch.Tensor] = {}
    leftover = unpack(Leftover, pack(leftover, tensors, "left"), tensors)
    second, _ = sample(part(start=cut), Start(shape=shape, seed=3, add_noise=False, latents=first, leftover=leftover))
    assert torch.equal(second, whole)


@pytest.mark.parametrize("positions", ["video", "own"])
@pytest.mark.parametrize("known_through", ["none", "concat", "known"])
def test_the_model_sees_the_size_of_the_step_and_known_frames_too(known_through, positions):
    """Image channels and known frames are those of the smaller size; known frames come out as they went in."""
    picture = draw_noise(4, (1, 20, 3, 8, 12))
    conditioning = {
        "none": TEXT,
        "concat": replace(TEXT, concat=picture),
        "known": replace(TEXT, known=picture[:, :16, :1]),
    }[known_through]
    model = small_dit(in_channels=36 if known_through == "concat" else 16)
    plan, given_inputs = staged((replace(STAGES[0], positions=positions),)), []
    hook = model.register_forward_pre_hook(lambda _, args: given_inputs.append((args[0].clone(), args[3].spacing)))
    latents = run(plan, conditioning, NOISE, lambda _: model)
    hook.remove()
    forwards = [step for step in plan.steps for _ in step.branches]
    for step, (inputs, spacing) in zip(forwards, given_inputs, strict=True):
        size = (8, 12) if step.scale == 1 else (4, 6)
        assert tuple(inputs.shape[3:]) == size
        assert spacing == ((1, 1) if positions == "own" else (8 / size[0], 12 / size[1]))
        if step.scale == 0.5 and known_through != "none":
            wanted = torch.nn.functional.avg_pool2d(picture[0], 2)[None]
            seen_known = inputs[:, 16:] if known_through == "concat" else inputs[:, :, :1]
            wanted = wanted if known_through == "concat" else wanted[:, :16, :1]
            torch.testing.assert_close(seen_known, wanted, rtol=1e-5, atol=1e-5)
    if known_through == "known":
        torch.testing.assert_close(latents[:, :, :1], picture[:, :16, :1])


@pytest.mark.parametrize(
    "setting", ["taylorseer:2/1/0.2", "adaptive:10/3/0", "every:2", "sparse:0.5/0/0", "guidance:0.8-1"]
)
def test_other_savings_go_with_it(setting):
    """Caches begin anew at each size; the run is deterministic and another than without stages."""
    skip = parse_setting(f"{setting}+stages:0.5/0.7-0.95")
    plan = skip_forwards(make_plan(steps=12, shift=8.0, guidance_high=2.0, guidance_low=2.0), skip, None)
    first, second = run(plan, noise=NOISE), run(plan, noise=NOISE)
    plain = skip_forwards(
        make_plan(steps=12, shift=8.0, guidance_high=2.0, guidance_low=2.0), parse_setting(setting), None
    )
    assert torch.equal(first, second) and first.isfinite().all()
    assert not torch.allclose(first, run(plain, noise=NOISE), atol=1e-3)
    for expert in EXPERTS.values():
        assert not expert.runners.runners, "nothing stays behind"


def test_details_of_the_full_size_outlive_a_stage():
    """The stage changes low frequencies alone of the video that is predicted: the others are the last full step's."""
    plan, videos = staged(), []

    def note(progress):
        video = progress.latents - progress.velocity * progress.step.sigma_next
        videos.append((progress.step.scale, video))

    run(plan, noise=NOISE, on_step=note)
    first = next(n for n, (scale, _) in enumerate(videos) if scale != 1)
    rows, columns = mean_over_areas(4, 8), mean_over_areas(6, 12)
    details = [video - rows.T @ (rows @ video @ columns.T) @ columns for _, video in videos]
    torch.testing.assert_close(details[first], details[first - 1], rtol=1e-3, atol=1e-3)
    assert float((videos[first][1] - videos[first - 1][1]).abs().max()) > 1e-3


def test_out_of_memory_in_a_smaller_step_changes_nothing():
    plan, failed = staged(), []
    wanted = run(plan, noise=NOISE)

    def fail(module, args):
        if args[0].shape[3] == 4 and not failed:
            failed.append(True)
            raise torch.cuda.OutOfMemoryError("test")

    hooks = [expert.register_forward_pre_hook(fail) for expert in EXPERTS.values()]
    latents = run(plan, noise=NOISE, relieve=lambda _: True)
    for hook in hooks:
        hook.remove()
    assert failed and torch.equal(latents, wanted)

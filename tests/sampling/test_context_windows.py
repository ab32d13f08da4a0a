"""Context windows: where they are, how they are fused, what a plan says, and runs that have them.

`tests/nodes/test_native_windows.py` compares them with ComfyUI's own sampler.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling.test_denoise import EXPERTS, TEXT, run, small_dit
from tests.sampling.test_window import sample
from wan_core.config import (
    FUSE_METHODS,
    WINDOW_SCHEDULES,
    OptionError,
    Request,
    SkipOptions,
    TaylorSeerOptions,
    WindowOptions,
)
from wan_core.models.wan.families import FAMILIES
from wan_core.models.wan.runners import ForwardInfo
from wan_core.sampling.cache.residual import residuals
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.context_windows import fuse_weights, window_weights, windows_of, with_windows
from wan_core.sampling.denoise import last_runs
from wan_core.sampling.guided import in_windows, model_inputs
from wan_core.sampling.plan import SCHEDULES, Plan, make_plan
from wan_core.sampling.schedules import Window
from wan_core.sampling.solvers import SOLVERS
from wan_core.sampling.start import Start, reordered_noise
from wan_core.workers.wire import unpack

SHAPE = (1, 16, 7, 4, 6)
NOISE = draw_noise(7, SHAPE)
# Windows that share nothing: each is a video of its own.
APART = WindowOptions(length=3, overlap=0, schedule="batched", fuse="flat", freenoise=False, lead=False)


@st.composite
def window_options(draw):
    length = draw(st.integers(1, 30))
    schedule = draw(st.sampled_from(WINDOW_SCHEDULES))
    fuses = [fuse for fuse in FUSE_METHODS if (schedule, fuse) != ("batched", "overlap-linear")]
    return WindowOptions(
        length=length,
        overlap=draw(st.integers(0, length - 1)),
        schedule=schedule,
        fuse=draw(st.sampled_from(fuses)),
        closed_loop=schedule == "looped_uniform" and draw(st.booleans()),
        freenoise=draw(st.booleans()),
        retain_first=draw(st.booleans()),
        lead=draw(st.booleans()),
    )


# ---------------------------------------------------------------------------------------------------------- the windows


@settings(max_examples=100)
@given(options=window_options(), more=st.integers(1, 60), step=st.integers(0, 50))
def test_windows_cover_every_frame_and_weights_sum_up_to_one(options, more, step):
    frames = options.length + more
    windows = windows_of(options, frames, step)
    assert len(set(windows)) == len(windows) > 1
    total = [0.0] * frames
    for window, weights in zip(windows, fuse_weights(windows, options, frames), strict=True):
        assert len(set(window)) == len(window) <= options.length and set(window) <= set(range(frames))
        assert len(window) == options.length or options.schedule == "batched"
        assert all(one + 1 == other or options.schedule == "looped_uniform" for one, other in pairwise(window))
        seen = options.seen(window)
        assert seen[-len(window) :] == window and len(seen) - len(window) == (options.lead and window[0] > 0)
        assert all(weight > 0 for weight in weights)
        for frame, weight in zip(window, weights, strict=True):
            total[frame] += weight
    assert total == pytest.approx([1.0] * frames)


def frame_by_frame(options, frames, step):
    """The windows written out: the moving ones begin at every `length - overlap` frames of a ring."""
    length, begins = options.length, options.length - options.overlap
    if options.schedule == "batched":
        return [[f for f in range(frames) if f // length == n] for n in range((frames + length - 1) // length)]
    if options.schedule == "standard_static":
        windows = [[first + n for n in range(length)] for first in range(0, frames - length, begins)]
        return [*windows, list(range(frames))[-length:]]
    turn = sum(2.0 ** (-1 - bit) for bit in range(16) if step >> bit & 1)  # van der Corput: 0, 1/2, 1/4, 3/4, ...
    first, windows = round(frames * turn), []
    past = first + frames - (0 if options.closed_loop else options.overlap)
    while first < past:
        windows.append([(first + n) % frames for n in range(length)])
        first += begins
    if options.schedule == "looped_uniform":
        return windows
    number = 0
    while number < len(windows):  # none goes past the end, and none is there twice
        if sorted(windows[number]) != windows[number]:
            windows[number] = list(range(frames))[-length:]
            if 0 not in windows[(number + 1) % len(windows)]:
                windows.insert(number + 1, list(range(length)))
        number += 1
    return [window for number, window in enumerate(windows) if window not in windows[:number]]


@settings(max_examples=100)
@given(options=window_options(), more=st.integers(1, 60), step=st.integers(0, 50))
def test_windows_are_those_written_out_frame_by_frame(options, more, step):
    frames = options.length + more
    assert windows_of(options, frames, step) == tuple(map(tuple, frame_by_frame(options, frames, step)))


@given(options=window_options(), data=st.data())
def test_weights_of_a_window_follow_its_fuse_method(options, data):
    length, apart, frames = options.length, options.overlap, options.length + 9
    window = sorted(data.draw(st.permutations(range(frames)))[:length])
    wanted = torch.ones(length, dtype=torch.float64)
    if options.fuse == "pyramid":
        wanted = torch.tensor([*range(1, length + 1)]).minimum(torch.tensor([*range(length, 0, -1)]))
    elif options.fuse == "relative":  # 1 in the middle of its span, falling to its ends
        middle, half = (window[0] + window[-1]) / 2, (window[-1] - window[0]) / 2 + 0.005
        wanted = (1 - (torch.tensor(window, dtype=torch.float64) - middle).abs() / half).clamp(min=0.01)
    elif options.fuse == "overlap-linear" and apart:  # where another window overlaps it
        ramp = torch.linspace(1e-37, 1, apart, dtype=torch.float64)
        if window[0] > 0:
            wanted[:apart] = ramp
        if window[-1] < frames - 1:
            wanted[length - apart :] = ramp.flip(0) if apart > 1 else 1.0
    assert window_weights(window, options, frames) == pytest.approx(wanted.tolist())


@given(options=window_options())
def test_words_say_everything(options):
    assert WindowOptions.parse(options.words()) == options
    request = Request(prompt="", windows=options)
    assert unpack(Request, json.loads(json.dumps(asdict(request)))) == request


def test_short_words():
    assert WindowOptions.parse("81") == WindowOptions(length=21, overlap=7)
    assert WindowOptions.parse("81/30:flat:retain").words() == "81/28:standard_uniform:flat:retain"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("80", "4n \\+ 1"),
        ("81/81", "smaller than the length"),
        ("81/x", "write length"),
        ("81/8/4", "write length"),
        ("81:nothing", "'nothing' unknown"),
        ("81:flat:pyramid", "'pyramid' unknown or once too often"),
        ("81:closed", "use looped_uniform"),
        ("81:batched:overlap-linear", "another fuse method"),
    ],
)
def test_what_is_no_windows_is_refused(text, message):
    with pytest.raises(OptionError, match=message):
        WindowOptions.parse(text)


# ------------------------------------------------------------------------------------------------------------- the plan


@settings(max_examples=20)
@given(
    options=window_options(),
    frames=st.integers(1, 60),
    steps=st.integers(1, 30),
    solver=st.sampled_from(sorted(SCHEDULES)),
)
def test_a_plan_counts_the_forwards_of_every_window(options, frames, steps, solver):
    """The estimate and the travel to workers, and the same plan again where one window holds the video."""
    options = replace(options, retain_first=False)
    plain = make_plan(steps=steps, solver=solver)
    plan = with_windows(plain, options, frames)
    assert unpack(Plan, json.loads(json.dumps(asdict(plan)))) == plan
    if frames <= options.length:
        assert replace(plan, notes=()) == plain and "fit into one" in plan.notes[0]
        assert plan.window_sizes(frames) == (frames,)
        return
    pairs = list(zip(plan.steps, plain.steps, strict=True))
    assert all(one.forwards == len(one.branches) * len(one.windows) for one in plan.steps)
    assert all(replace(one, windows=()) == other for one, other in pairs)
    last = plan.phases[-1][-1]  # what a streamed expert still has to run
    assert last_runs(plan.phases[-1], False) == (last.index, 2 * len(last.windows))
    assert last_runs(plan.phases[-1], True) == (last.index, len(last.windows))
    assert plan.estimate({"high": 2.0, "low": 3.0}) == sum(s.forwards * (2 + (s.expert == "low")) for s in plan.steps)
    assert max(plan.window_sizes(frames)) in (options.length, options.length + 1)
    assert f"{len(plan.steps[0].windows)} windows" in plan.table() and options.words() in plan.table()
    for expert in plan.experts:  # both begin alike, as the two samplers of a ComfyUI workflow do
        first = next(step for step in plan.steps if step.expert == expert)
        assert first.correction or first.windows == windows_of(options, frames, 0)


@pytest.mark.parametrize("family", [family for family in FAMILIES.values() if not family.context_windows])
def test_other_families_are_refused_by_name(family):
    with pytest.raises(OptionError, match=f"{family.tasks[0].name} takes inputs .* models of the family wan"):
        with_windows(make_plan(task=family.tasks[0].name), APART, 30)


def test_retaining_needs_an_image_beside_the_noise():
    for task in ("t2v-A14B", "ti2v-5B"):
        with pytest.raises(OptionError, match="no image beside its noise"):
            with_windows(make_plan(task=task), replace(APART, retain_first=True), 30)


CACHES = {
    "taylorseer": SkipOptions(taylorseer=TaylorSeerOptions(interval=2, order=1, retention=0.1)),
}


@pytest.mark.parametrize("name", CACHES)
def test_what_is_kept_of_a_window_needs_windows_that_stay(name):
    plan = with_windows(make_plan(steps=20), WindowOptions(length=3, overlap=1), 7)
    with pytest.raises(OptionError, match="standard_uniform move from step to step: use standard_static or batched"):
        skip_forwards(plan, CACHES[name], None)
    still = with_windows(make_plan(steps=20), WindowOptions(length=3, overlap=1, schedule="standard_static"), 7)
    assert skip_forwards(still, CACHES[name], None).unskipped == 20 * 2 * 3


# ------------------------------------------------------------------------------------------------------------- the runs


SETTINGS = {
    "plain": None,
    "taylorseer": CACHES["taylorseer"],
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_windows_that_share_nothing_are_videos_of_their_own(name, batched):
    """Bit for bit, with each window's own residuals."""
    plain = make_plan(steps=12, guidance_high=3.0, guidance_low=2.0)
    plan = skip_forwards(with_windows(plain, APART, 7), SETTINGS[name], None)
    whole, forwards = run(plan, noise=NOISE, batched=batched), []
    run(plan, noise=NOISE, on_step=lambda progress: forwards.append(progress.forwards))
    assert sum(forwards) == plan.forwards == 3 * skip_forwards(plain, SETTINGS[name], None).forwards
    alone = skip_forwards(plain, SETTINGS[name], None)
    wanted = [run(alone, noise=part, batched=batched) for part in NOISE.split(3, 2)]
    assert torch.equal(whole, torch.cat(wanted, 2))


@settings(max_examples=15)
@given(options=window_options(), batch=st.integers(1, 2), task=st.sampled_from(["t2v-A14B", "i2v-A14B", "ti2v-5B"]))
def test_a_step_equals_the_sum_written_out(options, batch, task):
    """What each forward sees of noise, image and timesteps, and how its prediction is fused."""
    options = replace(options, length=3, overlap=min(options.overlap, 2), retain_first=task == "i2v-A14B")
    inputs = draw_noise(1, (batch, 36, 7, 2, 2))
    time = draw_noise(2, (batch, 7)) if task == "ti2v-5B" else torch.ones(2)
    (step, *_) = with_windows(make_plan(task=task, steps=3), options, 7).steps
    told = []

    def forward(window_inputs, some_time, number):
        told.append((window_inputs.clone(), some_time, number))
        return draw_noise(number, (batch, 16, window_inputs.shape[2], 2, 2))

    step_velocity, wanted = in_windows(forward, inputs, time, step, options, 16), torch.zeros(batch, 16, 7, 2, 2)
    assert [number for *_, number in told] == list(range(len(step.windows)))
    weights = fuse_weights(step.windows, options, 7)
    for (window_inputs, some_time, number), window, shares in zip(told, step.windows, weights, strict=True):
        frames = list(options.seen(window))
        assert torch.equal(window_inputs[:, :16], inputs[:, :16, frames])
        if options.retain_first:
            assert torch.equal(window_inputs[:, 16:, 0], inputs[:, 16:, 0])
            assert torch.equal(window_inputs[:, 16:, 1:], inputs[:, 16:, frames[1:]])
        else:
            assert torch.equal(window_inputs, inputs[:, :, frames])
        assert torch.equal(some_time, time if time.ndim == 1 else time[:, frames])
        velocity = draw_noise(number, (batch, 16, len(frames), 2, 2))[:, :, -len(window) :]
        wanted[:, :, list(window)] += velocity * torch.tensor(shares)[:, None, None]
    torch.testing.assert_close(step_velocity, wanted)


@settings(max_examples=10)
@given(solver=st.sampled_from(sorted(SOLVERS)), steps=st.integers(2, 6), data=st.data())
def test_two_runs_in_a_row_are_one_run_bit_for_bit(solver, steps, data):
    """Also with windows that move: they are those of the step in the whole schedule."""
    cut = data.draw(st.integers(1, steps - 1))
    options = WindowOptions(length=3, overlap=1, freenoise=data.draw(st.booleans()))

    def part(**window):
        plan = make_plan(steps=steps, solver=solver, guidance_high=2.0, guidance_low=1.0, window=Window(**window))
        return skip_forwards(with_windows(plan, options, 7), None, None)

    whole, _ = sample(part(), Start(shape=SHAPE, seed=3))
    first, leftover = sample(part(end=cut, leftover=True), Start(shape=SHAPE, seed=3))
    second, _ = sample(part(start=cut), Start(shape=SHAPE, seed=3, add_noise=False, latents=first, leftover=leftover))
    assert torch.equal(whole, second)


def test_one_window_is_no_window_bit_for_bit():
    plan = make_plan(steps=4)
    wide = with_windows(plan, WindowOptions(length=7, overlap=2), 7)
    start = Start(shape=SHAPE, seed=5)
    assert torch.equal(sample(plan, start)[0], sample(wide, start)[0])


def test_freenoise_repeats_the_noise_of_earlier_frames():
    options = WindowOptions(length=4, overlap=1)
    noise = draw_noise(1, (1, 2, 12, 3, 3))
    reordered = reordered_noise(noise, options, seed=9)
    assert torch.equal(reordered[:, :, :4], noise[:, :, :4])
    for first in (0, 3):  # so many frames after a window are those at its beginning
        source, later = (reordered[:, :, at : at + 3].unbind(2) for at in (first, first + 4))
        assert sorted(next(n for n, one in enumerate(source) if torch.equal(one, other)) for other in later) == [
            0,
            1,
            2,
        ]
    assert torch.equal(noise, draw_noise(1, (1, 2, 12, 3, 3))), "the noise that was given stays as it is"
    start, plan = Start(shape=(1, 16, 12, 2, 2), seed=9), with_windows(make_plan(steps=2), options, 12)
    drawn = draw_noise(9, (1, 16, 12, 2, 2))
    assert torch.equal(start.sample(plan, None, torch.device("cpu")), reordered_noise(drawn, options, 9))


def test_windows_of_two_lengths_keep_their_rotation_tables():
    """A CUDA graph goes with its table: made anew for every forward, no graph would be replayed."""
    model, device = small_dit(), torch.device("cpu")
    first, second, shortest = (model.rope((frames, 2, 3), device) for frames in (5, 6, 2))
    assert first.shape[0] == 30 and second.shape[0] == 36 and shortest.shape[0] == 12
    assert model.rope((5, 2, 3), device) is first and model.rope((6, 2, 3), device) is second
    model.rope((7, 2, 3), device)
    assert model.rope((5, 2, 3), device) is first and model.rope((2, 2, 3), device) is not shortest


def test_each_window_has_residuals_of_its_own():
    """And none after the phase."""
    still = with_windows(make_plan(steps=12), replace(APART, schedule="standard_static", overlap=1), 7)
    plan = skip_forwards(still, CACHES["taylorseer"], None)
    model = small_dit()
    with residuals(model, plan.phases[0]) as cache:
        text = model.prepare_text(TEXT.cond)
        inputs, time = model_inputs(NOISE, torch.ones(1), TEXT)
        for step in plan.phases[0][:2]:
            in_windows(
                lambda window, at, number, step=step: model(window, at, text, info(step, number)),
                inputs, time, step, plan.context_windows, 16,
            )  # fmt: skip
        assert set(cache.kept) == {("cond", window) for window in range(3)}
    assert not model.runners.runners


def info(step, number):
    return ForwardInfo(step.index, ("cond",), bool(step.skipped), window=number)


def test_experts_and_windows():
    """Moving windows in a run of two experts: another video than without, all of it finite."""
    assert set(EXPERTS) == {"high", "low"}
    plan = make_plan(steps=6)
    moving = with_windows(plan, WindowOptions(length=3, overlap=1), 7)
    assert len({step.windows for step in moving.steps}) > 1 and len(moving.experts) == 2
    latents = run(moving, noise=NOISE)
    assert latents.isfinite().all() and not torch.equal(latents, run(plan, noise=NOISE))

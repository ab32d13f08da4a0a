"""ComfyUI's CONDITIONING and LATENT: texts with ranges, and what is refused because it would have no effect."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.denoised import denoise
from wan_core.config import NagOptions, OptionError, SkipOptions, TaylorSeerOptions
from wan_core.models.vae.config import VAE_22
from wan_core.models.wan.families import NAG, family_of
from wan_core.pipeline.comfy_conditioning import first_latents, join, read_texts
from wan_core.pipeline.model_parts import Parts
from wan_core.pipeline.sources import TINY, find_experts
from wan_core.sampling.cache.skipping import leave_out
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.plan import Plan, make_plan
from wan_core.sampling.texts import WHOLE, TextRange, assign_ranges, check_reuse, sigma_at
from wan_core.workers.wire import unpack

LATENT = {"samples": torch.zeros(1, 16, 2, 4, 6)}
SHAPE = (1, 16, 2, 4, 6)


@pytest.fixture(scope="module")
def experts() -> Parts:
    return find_experts(TINY / "t2v_high.safetensors", TINY / "t2v_low.safetensors")


def text(seed: int, experts: Parts, rows: int = 5, **extras: Any) -> list[Any]:
    return [draw_noise(seed, (1, rows, experts.dit.text_dim)), {"pooled_output": None, **extras}]


def ranged(seed: int, experts: Parts, start: float, end: float, **extras: Any) -> list[Any]:
    return text(seed, experts, start_percent=start, end_percent=end, **extras)


def plan_of(steps: int = 6, **numbers: Any) -> Plan:
    return make_plan(task="t2v-tiny", steps=steps, **numbers)


@pytest.mark.parametrize("cut", [0, 3])
def test_rows_of_zeros_behind_the_models_own_are_no_text(experts: Parts, cut: int) -> None:
    """A text encoder fills a text to 512 rows; the embedded model attends to fewer. More text stays."""
    length = experts.dit.text_len
    [[rows, extras]] = [text(1, experts, rows=length + cut)]
    filled = [torch.nn.functional.pad(rows, (0, 0, 0, 512 - len(rows[0]))), extras]
    [read] = read_texts([filled], "positive", experts.dit, family_of(experts.task)).rows
    assert torch.equal(read, filled[0] if cut else rows) and length < 512


# ---------------------------------------------------------------------------------------------------------- the plan


def test_a_share_of_the_run_is_comfyui_s_sigma() -> None:
    """ModelSamplingDiscreteFlow.percent_to_sigma: time_snr_shift(shift, 1 - percent)."""
    assert sigma_at(0, 5) == 1 and sigma_at(1, 5) == 0 and sigma_at(-1, 5) == 1 and sigma_at(2, 5) == 0
    assert sigma_at(0.25, 5) == pytest.approx(5 * 0.75 / (1 + 4 * 0.75))
    assert sigma_at(0.3, 1) == pytest.approx(0.7)


@given(
    st.integers(1, 30),
    st.floats(1, 15),
    st.lists(st.floats(0.01, 0.99), max_size=3, unique_by=lambda x: round(x, 2)),
    st.sampled_from([0.0, 1e-5]),
    st.sampled_from(["unipc", "euler"]),
)
def test_ranges_that_follow_one_another_give_every_step_one_text(
    steps: int, shift: float, cuts: list[float], gap: float, solver: str
) -> None:
    """Also with the gaps that ComfyUI's conditioning_set_values_with_timestep_range leaves; where two meet on a step,
    it has both."""
    borders = [0.0, *sorted(cuts), 1.0]
    ranges = [TextRange(a + gap * (a > 0), b - gap * (b < 1)) for a, b in pairwise(borders)]
    plan = make_plan(task="t2v-tiny", steps=steps, shift=shift, solver=solver)
    assigned = check_reuse(assign_ranges(plan, ranges, [WHOLE]))
    numbers = [step.texts[0] for step in assigned.steps]
    assert numbers == sorted(numbers) and all(step.texts[1] == 0 for step in assigned.steps)
    for step, n in zip(plan.steps, numbers, strict=True):
        slack = 1e-3
        assert sigma_at(ranges[n].end, shift) - slack <= step.sigma <= sigma_at(ranges[n].start, shift) + slack
    assert [replace(step, texts=(0, 0), also=()) for step in assigned.steps] == list(plan.steps)


@given(
    st.integers(1, 30),
    st.floats(1, 15),
    st.booleans(),
    st.lists(st.integers(1, 19), max_size=3, unique=True),
    st.lists(st.integers(1, 19), max_size=2, unique=True),
    st.sampled_from([0.0, 0.05, 0.21, 1.0]),
)
def test_a_step_has_the_texts_that_comfyui_gives_it_whatever_the_sigmas_of_the_run(
    steps: int, shift: float, same: bool, cuts: list[int], negative_cuts: list[int], overlap: float
) -> None:
    """`get_area_and_mult`: a text counts where the sigma, float32, is neither above its start nor below its end, which
    are `percent_to_sigma` of the MODEL's own sampling; of several that count, `calc_cond_batch` takes the mean.
    overlap: ranges begin and end by so much outside of their cuts."""
    of_model = shift if same else 6.5
    plan = make_plan(task="t2v-tiny", steps=steps, shift=shift, solver="euler")
    ranges = [
        [TextRange(max(0.0, a - overlap), min(1.0, b + overlap)) for a, b in pairwise([0.0, *sorted(own), 1.0])]
        for own in ([cut / 20 for cut in cuts], [cut / 20 for cut in negative_cuts])
    ]

    def at(share: float) -> torch.Tensor:
        return torch.tensor(of_model * (1 - share) / (1 + (of_model - 1) * (1 - share)))

    for step in check_reuse(assign_ranges(plan, *ranges, of_model)).steps:
        sigma, texts = torch.tensor(step.sigma), [one.texts for one in step.conditions]
        for branch, own in enumerate(ranges):
            active = [n for n, (start, end) in enumerate(own) if at(end) <= sigma <= at(start)]
            each = [sum(pair[branch] == n for pair in texts) for n in active]
            assert len(set(each)) == 1 and sum(each) == len(texts), "each of them counts as much as the others"


def test_ranges_that_meet_on_a_step_are_averaged_there() -> None:
    halves = [TextRange(0, 0.5), TextRange(0.5, 1)]
    plan = make_plan(task="t2v-tiny", steps=8, shift=8.0, solver="euler")
    counts = [len(step.conditions) for step in assign_ranges(plan, halves, [WHOLE]).steps]
    assert counts == [1, 1, 1, 1, 2, 1, 1, 1]
    assert assign_ranges(plan, halves, [WHOLE]).forwards == plan.forwards + 2


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0.0, 0.4), (0.6, 1.0)], "has no text for step"),
        ([(0.2, 1.0)], "has no text for step 0"),
        ([(0.0, 0.5)], "has no text for step"),
    ],
)
def test_gaps_are_refused(ranges: list[tuple[float, float]], message: str) -> None:
    plan = plan_of(20)
    with pytest.raises(OptionError, match=message) as fault:
        check_reuse(assign_ranges(plan, [TextRange(*one) for one in ranges], [WHOLE]))
    assert "positive" in str(fault.value) and "cover the run" in str(fault.value)
    with pytest.raises(OptionError, match="`negative`"):
        check_reuse(assign_ranges(plan, [WHOLE], [TextRange(*one) for one in ranges]))


def test_what_was_kept_of_one_text_is_not_used_for_another() -> None:
    plan = plan_of(20)
    skipping = leave_out(plan, SkipOptions(taylorseer=TaylorSeerOptions(interval=2)), None)
    with pytest.raises(OptionError, match="leave out step caching"):
        check_reuse(assign_ranges(skipping, [TextRange(0, 0.1), TextRange(0.1, 1)], [WHOLE]))
    assert check_reuse(assign_ranges(skipping, [WHOLE], [WHOLE])) == skipping


def test_texts_travel_to_workers_and_are_shown() -> None:
    plan = check_reuse(assign_ranges(plan_of(), [TextRange(0, 0.6), TextRange(0.4, 1)], [WHOLE]))
    assert unpack(Plan, json.loads(json.dumps(asdict(plan)))) == plan
    assert "text 2, negative 1" in plan.table() and "mean of 2 conditions" in plan.table()
    assert '"texts": [1, 0]' in json.dumps(plan.as_dict())
    assert "texts" not in json.dumps(plan_of().as_dict()) and "text" not in plan_of().table()


# --------------------------------------------------------------------------------------------------------------- runs


def test_a_negative_text_that_nag_alone_reads_changes_too(experts: Parts) -> None:
    nag = {NAG: NagOptions()}
    negative = [ranged(2, experts, 0.0, 0.5, **nag), ranged(3, experts, 0.5, 1.0, **nag)]
    joined = join([text(1, experts)], negative, LATENT, experts, plan_of(guidance_high=1.0, guidance_low=1.0))
    assert all(step.nag for step in joined.plan.steps) and joined.conditioning.later_uncond
    texts = [step.texts for step in joined.plan.steps]
    assert texts == sorted(texts) and set(texts) == {(0, 0), (0, 1)}


def run(experts: Parts, positive: list[Any], negative: list[Any], plan: Plan) -> torch.Tensor:
    joined = join(positive, negative, LATENT, experts, plan)
    models = {name: part.load(torch.device("cpu"), torch.float32, None) for name, part in experts.of.items()}
    return denoise(joined.plan, models.__getitem__, joined.conditioning, draw_noise(7, SHAPE))  # type: ignore[arg-type]


@pytest.mark.parametrize(("cut", "inside", "batched"), [(0.15, True, False), (0.8, True, True), (0.49, False, False)])
def test_every_step_attends_to_the_text_of_its_range(experts: Parts, cut: float, inside: bool, batched: bool) -> None:
    """Against runs with one text, of which each gives some of the steps; texts of several lengths."""
    plan, negative = plan_of(solver="euler"), [text(9, experts)]
    one, two = text(1, experts), text(2, experts, rows=9)
    both = [[one[0], {"start_percent": 0.0, "end_percent": cut}], [two[0], {"start_percent": cut, "end_percent": 1.0}]]
    joined = join(both, negative, LATENT, experts, plan)
    first = sum(step.texts[0] == 0 for step in joined.plan.steps)
    assert 0 < first < len(plan.steps)
    changes = plan.steps[first - 1].expert == plan.steps[first].expert
    assert changes == inside, "also during the steps of one expert"
    models = {name: part.load(torch.device("cpu"), torch.float32, None) for name, part in experts.of.items()}
    walk = partial(denoise, acquire=models.__getitem__, batched=batched)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, positive in (("one", [one]), ("both", both), ("two", [two])):
        joined_run = join(positive, negative, LATENT, experts, plan)
        note = seen.setdefault(name, [])
        walk(
            joined_run.plan,
            conditioning=joined_run.conditioning,
            noise=draw_noise(7, SHAPE),
            on_step=lambda p, n=note: n.append(p.latents),
        )
    for step in range(first):
        assert torch.equal(seen["both"][step], seen["one"][step])
    assert not torch.equal(seen["both"][first], seen["one"][first])
    # The second half is that of a run which begins where the first one ended.
    later_plan = replace(plan, steps=plan.steps[first:])
    alone = join([two], negative, LATENT, experts, plan)
    x, history = seen["both"][first - 1], []
    for step in later_plan.steps:
        model = models[step.expert]
        time = torch.tensor([step.timestep])
        cond = model(x, time, alone.conditioning.cond)
        assert alone.conditioning.uncond is not None
        uncond = model(x, time, alone.conditioning.uncond)
        x = x + (step.sigma_next - step.sigma) * (uncond + step.guidance * (cond - uncond))
        history.append(x)
    for mine, theirs in zip(seen["both"][first:], history, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-3)


def test_the_velocity_of_two_texts_is_the_mean_of_theirs(experts: Parts) -> None:
    """In a step that two ranges share, for both guidance branches."""
    plan = plan_of(4, solver="euler")
    both = [text(1, experts), text(2, experts, rows=9)]
    negative = [ranged(8, experts, 0.0, 1.0), ranged(9, experts, 0.0, 1.0)]
    models = {name: part.load(torch.device("cpu"), torch.float32, None) for name, part in experts.of.items()}

    def first(*texts: list[Any]) -> torch.Tensor:
        joined, seen = join(*texts, LATENT, experts, plan), list[Any]()
        noise = draw_noise(7, SHAPE)
        denoise(joined.plan, models.__getitem__, joined.conditioning, noise, on_step=seen.append)  # type: ignore[arg-type]
        assert sum(one.forwards for one in seen) == joined.plan.forwards
        return seen[0].velocity

    mean = torch.stack([first([one], [other]) for one, other in zip(both, negative, strict=True)]).mean(0)
    torch.testing.assert_close(first(both, negative), mean)
    uneven = torch.stack([first([one], [negative[0]]) for one in both]).mean(0)
    torch.testing.assert_close(first(both, negative[:1]), uneven)
    skipping = leave_out(plan_of(20), SkipOptions(taylorseer=TaylorSeerOptions(interval=2)), None)
    with pytest.raises(OptionError, match="leave out step caching"):
        join(both, negative, LATENT, experts, skipping)


# --------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "extras",
    [
        {"vace_frames": [torch.zeros(1)]},
        {"mask": torch.ones(1, 4, 4)},
        {"area": (1, 1, 0, 0)},
        {"strength": 0.5},
        {"reference_latents": [torch.zeros(1)]},
        {"control": object()},
        {"hooks": object()},
        {"clip_start_percent": 0.0},
        {"camera_conditions": torch.zeros(1)},
    ],
)
def test_what_the_model_would_not_see_is_refused_by_name(experts: Parts, extras: dict[str, Any]) -> None:
    plan = plan_of()
    for pair in (
        ([text(1, experts, **extras)], [text(2, experts)]),
        ([text(1, experts)], [text(2, experts, **extras)]),
    ):
        with pytest.raises(OptionError, match=next(iter(extras))):
            join(*pair, LATENT, experts, plan)


def test_texts_that_cannot_be_one_run_are_refused(experts: Parts) -> None:
    plan, negative = plan_of(), [text(2, experts)]
    cases = [
        ([], "`positive` has no text"),
        ([[torch.zeros(1, 3, 7), {}]], "encode it with the text encoder"),
        (
            [ranged(1, experts, 0, 0.5, concat_mask=torch.ones(1)), ranged(1, experts, 0.5, 1)],
            "different values of concat_mask",
        ),
    ]
    for positive, message in cases:
        with pytest.raises(OptionError, match=message):
            join(positive, negative, LATENT, experts, plan)
    image = {"concat_latent_image": torch.zeros(SHAPE)}
    other = {"concat_latent_image": torch.ones(SHAPE)}
    with pytest.raises(OptionError, match="`positive` and `negative` carry different values of concat_latent_image"):
        join([text(1, experts, **image)], [text(2, experts, **other)], LATENT, experts, plan)


def test_latents_that_hold_a_video_are_refused(experts: Parts) -> None:
    """Empty are zeros, and the mean of each channel, which Wan22ImageToVideoLatent gives."""
    plan, positive, negative = plan_of(), [text(1, experts)], [text(2, experts)]
    with pytest.raises(OptionError, match="holds a video"):
        join(positive, negative, {"samples": torch.randn(SHAPE)}, experts, plan)
    means = torch.tensor(VAE_22.latents_mean[:16]).view(1, -1, 1, 1, 1).expand(SHAPE)
    join(positive, negative, {"samples": means}, experts, plan)
    unknown = torch.ones(1, 1, *SHAPE[2:])
    with pytest.raises(OptionError, match="holds a video"):
        join(positive, negative, {"samples": torch.randn(SHAPE), "noise_mask": unknown}, experts, plan)


@given(known_frames=st.integers(0, 2), filled=st.integers(0, 2), from_latents=st.booleans())
def test_latents_are_taken_where_the_plan_starts_from_them(known_frames: int, filled: int, from_latents: bool) -> None:
    """And where anything but the known frames is in them, in whichever frame it is."""
    samples = torch.zeros(SHAPE)
    samples[:, :, :known_frames] = draw_noise(3, (1, 16, known_frames, 4, 6))
    if filled < 2:
        samples[0, 7, filled, 2, 3] = 0.5
    holds_video = known_frames <= filled < 2
    plan = replace(plan_of(), from_latents=from_latents)
    if holds_video and not from_latents:
        with pytest.raises(OptionError, match="holds a video"):
            first_latents(plan, samples, known_frames)
    else:
        assert first_latents(plan, samples, known_frames) is (samples if holds_video else None)

"""Bounded step caching: its rule, what it judges, and that a run is the same however it is carried out."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling.test_denoise import EXPERTS, NOISE
from tests.sampling.test_residual import run
from wan_core.checkpoint.load import load_dit
from wan_core.config import AdaptiveOptions, OptionError, SkipOptions
from wan_core.sampling.cache import residual
from wan_core.sampling.cache.adaptive_run import Adaptive
from wan_core.sampling.cache.arguments import parse_adaptive
from wan_core.sampling.cache.policies import EARLY_STEPS, FORECAST, LAG, Judged, Judgement, fewest_forwards, remainder
from wan_core.sampling.cache.residual import forecast
from wan_core.sampling.cache.skipping import leave_out, skip_words
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.cutting import cut_plan
from wan_core.sampling.guided import Guided
from wan_core.sampling.plan import make_plan
from wan_core.sampling.schedules import Window

CPU = torch.device("cpu")
COUNT = math.ceil(FORECAST) + 1  # residuals of a forecast


class NotYet:
    """Stands for a number that may still be on its way."""

    def synchronize(self) -> None:
        raise AssertionError("the host waits for a step that may still be running")


def guided_above(sigma, plan):
    """`plan` without guidance from a share of noise on."""
    steps = (s if s.sigma >= sigma else dataclasses.replace(s, guidance=1.0, branches=("cond",)) for s in plan.steps)
    return dataclasses.replace(plan, steps=tuple(steps))


def bound_of(bound):
    return SkipOptions(adaptive=parse_adaptive(f"bound:{bound}"))


def bounded(bound=0.3, steps=24):
    return leave_out(make_plan(steps=steps, solver="euler"), bound_of(bound), None)


def watched(plan, **options):
    """The latents, and which steps were computed."""
    computed = []
    x = run(plan, on_step=lambda p: computed.append(p.forwards > 0), **options)
    return x, computed


@settings(max_examples=15)
@given(st.sampled_from((0.03, 0.1, 0.3)), st.integers(0, 1000), st.booleans())
def test_forecasts_of_smooth_velocities_stay_within_the_bound(bound, seed, jumps):
    """A velocity of 16 numbers, each a slow wave: the true errors of skipped steps, whose residuals nobody computes in
    a run. jumps: in the middle it becomes another within one step, after which the bound is kept again."""
    draw = random.Random(seed)
    waves = [[(draw.gauss(0, 1), draw.uniform(8, 40), draw.uniform(0, 7)) for _ in range(16)] for _ in range(2)]
    plan = leave_out(make_plan(steps=40, boundary=0), SkipOptions(adaptive=parse_adaptive(f"bound:{bound}")), None)

    def velocity(step):
        own = waves[jumps and step >= 20]
        return [5 + size * math.sin(step / length + begin) for size, length, begin in own]

    rule, judged, errors = Judged(plan.adaptive), {}, {}
    for step in plan.steps:
        past = rule.sources(step, before=step.index)
        sources = [judged[index] for index in sorted(judged) if index <= step.index - LAG][-2:]
        skipped = rule.decide(step, sources)
        if past is None:
            continue
        weights, true = forecast(past, step.index, FORECAST), velocity(step.index)
        forecast_velocity = [sum(w * velocity(i)[n] for i, w in zip(past, weights, strict=True)) for n in range(16)]
        error = math.dist(forecast_velocity, true) / math.hypot(*true)
        if skipped:
            errors[step.index] = error, step.forecast_bound
        elif step.action == "adaptive":
            judged[step.index] = Judgement(step.index, error, remainder(past, step.index))
    assert errors, "nothing is skipped"
    steady = [(e, b) for i, (e, b) in errors.items() if not jumps or not 20 <= i < 20 + LAG + rule.options.max_skips]
    assert sum(e for e, _ in steady) <= sum(b for _, b in steady)
    assert sum(e <= 1.5 * b for e, b in steady) >= 0.95 * len(steady) - 1


def test_first_steps_have_a_third_and_are_computed():
    plan = bounded(steps=20)
    early = [step for step in plan.steps if step.index < 20 * EARLY_STEPS and step.forecast_bound]
    assert {round(step.forecast_bound, 6) for step in early} <= {0.1}
    for phase in plan.phases:
        assert [step.action for step in phase[:COUNT]] == ["compute"] * COUNT
        assert all(step.forecast_bound for step in phase[COUNT:] if not step.finishes)
    plan = bounded(bound=10)
    _, computed = watched(plan)
    assert 2 * sum(computed) == fewest_forwards(plan) and f"{fewest_forwards(plan)} to 48 forwards" in plan.notes[-1]
    assert all(computed[: COUNT + LAG]) and computed.count(False) > 4  # nothing is judged before
    assert all(watched(bounded(bound=0))[1])


def test_a_bound_of_nothing_changes_nothing_bit_for_bit():
    assert torch.equal(run(bounded(bound=0)), run(make_plan(steps=24, solver="euler")))


def test_what_is_judged_is_the_error_of_the_forecast(monkeypatch):
    """Against residuals computed apart, in a run that skips nothing: of the guided velocity."""
    plan, judged, velocities = bounded(bound=0), {}, {}
    judge, forecast_of = Adaptive.judge, Guided.forecast_of

    def seen(self, step, sums):
        judge(self, step, sums)
        judged[step.index] = float((sums[0] / sums[1]).sqrt())

    def wrong_forecast(self, step, skip):
        velocities[step.index] = forecast_of(self, step, skip)
        return velocities[step.index]

    monkeypatch.setattr(Adaptive, "judge", seen)
    monkeypatch.setattr(Guided, "forecast_of", wrong_forecast)
    computed = {}
    run(plan, on_step=lambda p: computed.update({p.step.index: p.velocity}))
    assert set(judged) == {step.index for step in plan.steps if step.action == "adaptive"}
    monkeypatch.undo()
    # The same forecast as the cache of a fixed plan makes, which skips this step alone.
    for step in (phase[COUNT + 1] for phase in plan.phases):
        alone = dataclasses.replace(step, action="forecast", forecast_bound=0.0)
        others = [dataclasses.replace(one, action="compute", skipped=(), order=0) for one in plan.steps]
        fixed = dataclasses.replace(
            plan, adaptive=None, steps=(*others[: step.index], alone, *others[step.index + 1 :])
        )
        skipped = {}
        run(fixed, on_step=lambda p: skipped.update({p.step.index: p.velocity}))  # noqa: B023
        torch.testing.assert_close(velocities[step.index], skipped[step.index], rtol=1e-4, atol=1e-5)
        wanted = (skipped[step.index] - computed[step.index]).norm() / computed[step.index].norm()
        assert judged[step.index] == pytest.approx(float(wanted), rel=1e-3)


def test_decisions_read_only_what_has_arrived_long_ago(monkeypatch):
    decide, decided = Adaptive.decide, []

    def checked(self, step):
        everything = list(self.measured)
        self.measured[:] = [(i, mark if i <= step.index - LAG else NotYet()) for i, mark in everything]
        decided.append(decide(self, step))
        self.measured[:] = everything
        return decided[-1]

    monkeypatch.setattr(Adaptive, "decide", checked)
    run(bounded())
    assert len(decided) == 24 and any(decided) and not all(decided)


def test_a_batch_of_two_both_branches_at_once_and_a_repeated_run():
    """Two equal videos are skipped as one; both branches in one forward, and again after a run that was broken off."""
    plan = bounded()
    exact, computed = watched(plan)
    assert computed.count(False) > 0
    both, same = watched(plan, batched=True)
    assert same == computed
    torch.testing.assert_close(both, exact, rtol=1e-4, atol=1e-4)
    two, same = watched(plan, noise=NOISE.expand(2, -1, -1, -1, -1))
    assert same == computed
    torch.testing.assert_close(two[1:], exact, rtol=1e-4, atol=1e-4)

    def stop(progress):
        if progress.step.index == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, on_step=stop)
    assert torch.equal(run(plan), exact)


@pytest.mark.parametrize("of", ["guidance", "start"])
def test_guidance_that_ends_and_a_start_in_the_middle(of):
    """A branch that comes later is forecast once it has enough residuals; a run from a video begins anew."""
    if of == "guidance":
        plan = leave_out(guided_above(0.5, make_plan(steps=24, solver="euler")), bound_of(1.0), None)
    else:
        whole = make_plan(steps=40, solver="euler", window=Window(start=16))
        plan = cut_plan(leave_out(whole, SkipOptions(adaptive=parse_adaptive("bound:1.0")), None))
    latents, computed = watched(plan)
    assert latents.isfinite().all() and computed.count(False) > 1
    assert torch.equal(watched(plan)[0], latents)


def test_words_of_the_command_line():
    options = parse_adaptive("bound:0.05")
    assert options == AdaptiveOptions(threshold=0.05)
    assert skip_words(SkipOptions(adaptive=options)) == "adaptive bound:0.05/3/0"
    assert parse_adaptive("bound:0.05/3/0") == options
    with pytest.raises(OptionError, match="write bound:error/skips"):
        parse_adaptive("0.05")


@pytest.mark.parametrize(("bound", "of"), [(0.1, "text"), (0.4, "guidance that ends")])
def test_errors_of_skipped_steps_of_the_embedded_model_stay_within_the_bound(monkeypatch, bound, of):
    """Their true errors: the blocks run too, from the same latents, and nothing of it is kept."""
    keep_before, errors, making = residual.keep_before, [], [False]
    monkeypatch.setattr(
        residual, "keep_before", lambda *arguments: [None] * len(arguments[0]) if making[0] else keep_before(*arguments)
    )
    real = Guided.velocity

    def compared(self, x, timestep, step):
        velocity, forwards = real(self, x, timestep, step)
        if not forwards:
            making[0] = True
            decided, self.adaptive = self.adaptive, None
            true, _ = real(self, x, timestep, dataclasses.replace(step, action="compute", skipped=(), order=0))
            self.adaptive, making[0] = decided, False
            errors.append((float((velocity - true).norm() / true.norm()), step.forecast_bound))
        return velocity, forwards

    monkeypatch.setattr(Guided, "velocity", compared)
    plan = make_plan(task="t2v-tiny", steps=40)
    embedded_run(leave_out(plan if of == "text" else guided_above(0.6, plan), bound_of(bound), None))
    assert len(errors) > 5
    assert sum(error for error, _ in errors) <= sum(most for _, most in errors)
    assert sum(error <= 1.5 * most for error, most in errors) >= 0.95 * len(errors)


def embedded_run(plan):
    tiny = Path(residual.__file__).parents[2] / "assets" / "tiny"
    experts = {name: load_dit(tiny / f"t2v_{name}.safetensors", device=CPU, dtype=torch.float32) for name in EXPERTS}
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(1, n, experts["high"].config.text_dim, generator=generator) for n in (6, 1)]
    noise = torch.randn(1, 16, 3, 10, 14, generator=torch.Generator().manual_seed(2))
    run(plan, noise, Conditioning(cond=rows[0], uncond=rows[1]), experts)

"""The words of `speed`: what each does in a run, and that each door takes the same ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from wan_core.config import EXACT, SPEEDS, LoadOptions, MagCacheOptions, OptionError, Request, SkipOptions
from wan_core.config.table import table
from wan_core.ops import cards
from wan_core.pipeline.check import check_request
from wan_core.pipeline.pipeline import LocalEngine
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.cache.speed import WORDS
from wan_core.sampling.plan import Plan, make_plan

QUALITY = Path(__file__).parents[2] / "docs" / "quality.md"
DISTILLED = Path("wan2.2_t2v_lightx2v_4steps_lora_v1_high_noise.safetensors")


def at(word: str, steps: int, **more: object) -> Plan:
    return skip_forwards(make_plan(steps=steps, **more), SkipOptions(speed=word), None)


def cost(plan: Plan) -> float:
    return sum(step.forwards * (1 - 0.5 * step.sparsity) for step in plan.steps)


def test_each_word_is_declared_once_and_has_one_row() -> None:
    assert tuple(WORDS) == SPEEDS and SPEEDS[0] == EXACT
    with pytest.raises(OptionError, match="use one of: exact, careful, balanced, fast"):
        SkipOptions(speed="quick")


@pytest.mark.parametrize("steps", [4, 9, 10, 19, 20, 29, 30, 39, 40, 60])
def test_each_word_costs_no_more_than_the_one_before(steps: int) -> None:
    costs = [cost(at(word, steps)) for word in SPEEDS]
    assert costs == sorted(costs, reverse=True) and costs[0] == cost(make_plan(steps=steps))
    assert (costs[1] < costs[0]) == (steps >= 30)
    assert (costs[3] < costs[2] < costs[0]) == (steps < 10 or steps >= 20)
    for word in SPEEDS[1:]:
        assert any(note.startswith(f"speed {word}: ") for note in at(word, steps).notes)


@pytest.mark.parametrize(("guidance", "warned"), [(3.5, False), (6.0, False), (7.0, True)])
def test_guidance_that_forecasts_were_not_judged_at_is_named(guidance: float, warned: bool) -> None:
    def says(word: str) -> bool:
        notes = at(word, 20, guidance_high=guidance, guidance_low=3.0).notes
        return any(note.startswith("guidance 7: TaylorSeer") for note in notes)

    assert (says("balanced"), says("careful"), says(EXACT)) == (warned, False, False)


def test_forwards_of_each_word_are_those_that_were_judged_and_that_are_told() -> None:
    guided = {"guidance_high": 4.0, "guidance_low": 3.0}
    forwards = {steps: [at(word, steps, **guided).forwards for word in SPEEDS] for steps in (40, 30, 20, 12)}
    assert forwards == {40: [80, 56, 50, 38], 30: [60, 46, 42, 36], 20: [40, 40, 34, 28], 12: [24] * 4}
    shares = {steps: [int(100 * (1 - one / (2 * steps)) + 0.5) for one in forwards[steps][1:]] for steps in (40, 20)}
    told = [f"{a}, {b} and {c} % of {steps}" for steps, (a, b, c) in shares.items()]
    tip = table(SkipOptions)["speed"].tip
    assert all(text in tip for text in told), told
    quality = QUALITY.read_text(encoding="utf-8")
    for number, word in enumerate(SPEEDS[1:], start=1):
        cells = [f"| `{word}`"]
        for steps in (40, 30, 20):
            skip = WORDS[word].many.get(steps)
            seer = skip and skip.taylorseer
            cells.append(f"{seer.interval}, {seer.retention:g}: {forwards[steps][number]}" if seer else "everything")
        assert " | ".join(cells) in quality, cells


def test_a_word_that_leaves_nothing_out_says_why() -> None:
    assert "nothing is left out, as a forecast is too far off in 20 steps; " in at("careful", 20).notes[-1]
    distilled = skip_forwards(make_plan(steps=4), SkipOptions(speed="careful"), None, loras=[DISTILLED])
    assert "speed careful: nothing is left out; " in distilled.notes[-1]


def test_exact_is_the_full_run() -> None:
    plan = skip_forwards(make_plan(steps=20), SkipOptions(), None)
    assert at(EXACT, 20) == plan and plan.forwards == plan.unskipped


def test_step_distilled_weights_have_the_words_of_few_steps() -> None:
    for word in SPEEDS[1:]:
        plan = skip_forwards(make_plan(steps=20), SkipOptions(speed=word), None, loras=[DISTILLED])
        assert plan.forwards == plan.unskipped and plan.sparse == WORDS[word].few.sparse


def test_a_solver_that_no_cache_fits_runs_every_step() -> None:
    plan = at("balanced", 20, solver="heun")
    assert plan.forwards == plan.unskipped and "no step is forecast: the solver is heun" in plan.notes


def test_a_solver_of_two_forwards_a_step_has_the_words_of_its_steps() -> None:
    assert at("fast", 6, solver="heun").sparse == WORDS["fast"].few.sparse
    assert at("fast", 10, solver="heun").sparse is None


def test_a_word_and_settings_are_refused() -> None:
    with pytest.raises(OptionError, match="speed fast and magcache given"):
        SkipOptions(speed="fast", magcache=MagCacheOptions.parse("0.24/1/0.1"))


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> str:
    """The 8-bit attention that `fast` takes here, as on a card that has one."""
    monkeypatch.setattr(cards, "NO_CARD", replace(cards.NO_CARD, rounding=("math-fp8",)))
    return "math-fp8"


def request(word: str) -> Request:
    return Request(prompt="x", width=96, height=96, frames=5, steps=2, skip=SkipOptions(speed=word))


def test_attention_follows_the_word_on_models_that_are_loaded(rounding: str) -> None:
    """Whichever word came first, the latents are those of models that were loaded for it."""
    options = LoadOptions(model="tiny", device="cpu")
    engine, latents = LocalEngine(), {}
    for word, attention in ((EXACT, "sdpa"), ("careful", rounding), (EXACT, "sdpa")):
        made = engine.generate(options, request(word))
        assert made.report.settings["attention"] == attention
        assert torch.equal(latents.setdefault(word, made.latents), made.latents)
    pipes = {engine.load(options, request(word)) for word in SPEEDS}
    assert len(pipes) == 1, "a word does not load the models again"
    other = LocalEngine().generate(options, request("careful"))
    assert torch.equal(other.latents, latents["careful"]) and not torch.equal(other.latents, latents[EXACT])
    named = engine.generate(replace(options, attention="math"), request("careful"))
    assert named.report.settings["attention"] == "math"


def test_the_plan_says_what_attention_does() -> None:
    job = check_request(LoadOptions(model="tiny"), request("careful"), torch.device("cpu"))
    assert job.plan.speed == "careful" and "attention auto is 8-bit" in job.plan.notes[0]

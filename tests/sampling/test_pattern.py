"""Step patterns: which steps they compute, for any number of steps, and what they refuse."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wan_core.config import GuidanceOptions, OptionError, PatternOptions, SkipOptions
from wan_core.config.table import slashes
from wan_core.sampling.cache.arguments import parse_setting
from wan_core.sampling.cache.policies import parse_pattern
from wan_core.sampling.cache.residual import residual_program
from wan_core.sampling.cache.skipping import leave_out, skip_forwards
from wan_core.sampling.native.plan import WholeRun, cut, plan_part
from wan_core.sampling.plan import make_plan
from wan_core.sampling.schedules import Window

MARKS = st.text("01", max_size=40).map(lambda marks: "1" + marks)


def computed(plan):
    return [step.index for step in plan.steps if not step.skipped]


def test_a_pattern_as_long_as_the_phases_is_taken_as_it_is():
    plan = make_plan(steps=40)  # 26 high, 14 low
    high, low = "11101001001001010101010101", "10100100100111"
    skipping = leave_out(plan, SkipOptions(pattern=PatternOptions(high=high, low=low)), None)
    assert computed(skipping) == [i for i, mark in enumerate(high + low) if mark == "1"]
    assert skipping.unskipped == 80 and skipping.forwards == 2 * (high + low).count("1")


def test_half_the_steps_compute_at_the_same_noise():
    options = PatternOptions(high="1" + "000" * 5 + "0000001000", low="1" * 14)
    few = leave_out(make_plan(steps=20), SkipOptions(pattern=options), None)
    high = [step for step in few.phases[0] if not step.skipped]
    # the 23rd of 26 steps; a step of 20 lasts as long as two of 40
    assert [step.index for step in high] == [0, 22 * 13 // 26]
    assert not any(step.skipped for step in few.phases[1])


def test_one_transformer_uses_both_patterns_in_a_row():
    plan = make_plan(task="ti2v-5B", steps=20)
    skipping = leave_out(plan, SkipOptions(pattern=PatternOptions(high="10", low="11")), None)
    assert computed(skipping) == [0, 10, 15, 19]  # the last step is always computed


@settings(max_examples=200, deadline=None)
@given(MARKS, MARKS, st.sampled_from([0, 1, 1.5, 2]), st.integers(10, 60), st.integers(1, 4), st.floats(0, 0.5))
def test_every_plan_holds_what_it_uses(high, low, order, steps, every, least):
    """Any pattern, number of steps and guidance schedule has a program for both branches, orders included."""
    guidance = GuidanceOptions(low=least, every=every)
    options = SkipOptions(pattern=PatternOptions(high=high, low=low, order=order), guidance=guidance)
    plan = leave_out(make_plan(steps=steps), options, None)
    for phase in plan.phases:
        assert not phase[0].skipped
        for branch in ("cond", "uncond"):
            program = residual_program(phase, branch)
            for terms in program.use.values():
                assert sum(weight for _, weight in terms) == pytest.approx(1)
    assert not plan.steps[-1].skipped
    assert parse_pattern(slashes(options.pattern)) == options.pattern


def test_a_part_of_a_run_uses_the_pattern_of_the_whole():
    options = SkipOptions(pattern=PatternOptions(high="1010", low="10101"))
    whole = skip_forwards(make_plan(steps=40), options, None)
    part = skip_forwards(make_plan(steps=40, window=Window(start=20)), options, None)
    later = [step.sigma for step in whole.steps[24:] if not step.skipped]
    assert [step.sigma for step in part.steps[4:] if not step.skipped] == later


@pytest.mark.parametrize(
    "text", ["", "1", "0110/11", "12/11", "11/", "11/11/x", "11/11/3", "1/1/1/1", "1" * 1001 + "/1"]
)
def test_refused_in_words(text):
    with pytest.raises(OptionError, match=r"pattern|order"):
        parse_pattern(text)


def test_as_a_setting():
    assert parse_setting("pattern:1101/101+sparse:fast").pattern == PatternOptions(high="1101", low="101", order=1.5)
    with pytest.raises(OptionError, match="only one step cache"):
        parse_setting("pattern:11/11+taylorseer:2")


def test_two_samplers_of_a_native_model_compute_the_pattern_of_the_run():
    """Each sampler knows its own sigmas and the number of steps; together they compute what one run does."""
    options = SkipOptions(pattern=PatternOptions(high="101001", low="1100"))
    sigmas = [1 - i / 20 for i in range(21)]
    run = {"task": "Wan 2.2", "solver": "euler", "shift": 5.0, "boundary": 0.875, "guidance": 3.5}
    indices = []
    for part in (sigmas[:11], sigmas[10:]):
        place = WholeRun(sigmas=tuple(sigmas)).place(part, 5.0)
        plan = leave_out(plan_part(place, branches=("cond", "uncond"), **run), options, None)
        indices += [step.index for step in cut(plan, place).steps if not step.skipped]
    # 6 marks on the first 10 steps, 4 on the last 10, whose last step is always computed
    assert indices == [0, 2 * 10 // 6, 5 * 10 // 6, 10, 10 + 10 // 4, 19]

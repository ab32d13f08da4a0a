"""The plan of a part of a schedule, and when what is kept of a branch may be used: without ComfyUI."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wan_core.config import (
    MagCacheOptions,
    OptionError,
    SkipOptions,
    TaylorSeerOptions,
)
from wan_core.sampling.cache.curves import find_curve
from wan_core.sampling.cache.residual import Residuals, residual_program
from wan_core.sampling.cache.skipping import leave_out
from wan_core.sampling.native.plan import Part, check_native, cut, place, plan_part
from wan_core.sampling.plan import Plan, make_plan
from wan_core.sampling.schedules import euler_schedule, float32

CURVE = find_curve(None, "t2v-A14B")
POLICIES = (
    SkipOptions(taylorseer=TaylorSeerOptions(interval=2, retention=0.4)),
    SkipOptions(taylorseer=TaylorSeerOptions(interval=3, retention=0.2)),
)
NOTHING = SkipOptions()
NUMBERS = {"name": "t2v-A14B", "solver": "euler", "guidance": 4.0, "branches": ("cond", "uncond")}


def planned(part: Part, shift: float, boundary: float, policy: SkipOptions = NOTHING) -> Plan:
    return leave_out(plan_part(part, shift=shift, boundary=boundary, **NUMBERS), policy, CURVE)


@settings(deadline=None, max_examples=20)
@given(st.integers(2, 60), st.floats(1, 12), st.data(), st.booleans())
def test_a_part_is_found_in_its_run(total: int, shift: float, data: st.DataObject, known: bool) -> None:
    whole = tuple(euler_schedule(total, shift)[0])
    first = data.draw(st.integers(0, total - 1))
    last = data.draw(st.integers(first + 1, total))
    sigmas = whole[first : last + 1]
    part = place(sigmas, shift, total if known else 0)
    assert (part.first, part.stop, part.total) == (first, last, total)
    assert part.whole == pytest.approx(whole, rel=1e-3, abs=1e-5) and part.whole[first : last + 1] == sigmas
    index = data.draw(st.integers(first, last - 1))
    assert part.step_at(float32(whole[index])) == (index, True)
    assert part.step_at(0.7 * whole[index] + 0.3 * whole[index + 1]) == (index, False)


def test_a_part_that_does_not_fit_is_refused() -> None:
    whole = tuple(euler_schedule(20, 5.0)[0])
    for steps, sigmas, message in (
        (0, (0.5, 0.7), "fall"),
        (0, (0.5,), "fall"),
        (3, whole[:6], "this sampler runs 5"),
    ):
        with pytest.raises(OptionError, match=message):
            place(sigmas, 5.0, steps)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("split", [3, 9, 17])
def test_two_samplers_share_the_plan_of_one_run(policy: SkipOptions, split: int) -> None:
    """Each makes the whole plan of what it sees of it: together, the steps of the engine's own plan."""
    sigmas, _ = euler_schedule(24, 8.0)
    boundary = (sigmas[split - 1] + sigmas[split]) / 2
    own = make_plan(task="t2v-A14B", steps=24, shift=8.0, boundary=boundary, guidance_high=4, guidance_low=4,
                    solver="euler")  # fmt: skip
    expected = leave_out(own, policy, CURVE)
    assert any(step.skipped for step in expected.steps)
    steps = []
    for begin, end in ((0, split), (split, 24)):
        part = place(sigmas[begin : end + 1], 8.0)
        steps += cut(planned(part, 8.0, 0.875, policy), part).steps
    assert [replace(s, timestep=0, sigma=0, sigma_next=0) for s in steps] == [
        replace(s, timestep=0, sigma=0, sigma_next=0) for s in expected.steps
    ]


def test_who_runs_the_steps() -> None:
    """The part alone says which of two experts runs; where one model runs everything, by the task's boundary."""
    sigmas, _ = euler_schedule(20, 8.0)
    parts = {(0, 20): 11, (0, 8): 8, (8, 20): 8, (14, 20): 14, (2, 9): 11, (12, 17): 11}
    for (begin, end), high in parts.items():
        part = place(sigmas[begin : end + 1], 8.0, 20)
        plan = planned(part, 8.0, 0.875)
        assert [step.expert for step in plan.steps] == ["high"] * high + ["low"] * (20 - high), (begin, end)
        assert {step.expert for step in planned(part, 8.0, 0.0).steps} == {"high"}


@settings(deadline=None, max_examples=20)
@given(st.integers(10, 40), st.sampled_from(POLICIES), st.data())
def test_a_part_uses_nothing_from_outside(total: int, policy: SkipOptions, data: st.DataObject) -> None:
    sigmas, _ = euler_schedule(total, 5.0)
    begin = data.draw(st.integers(0, total - 2))
    part = place(sigmas[begin:], 5.0, total)
    whole = planned(part, 5.0, 0.875, policy)
    plan = cut(whole, part)
    assert [step.index for step in plan.steps] == list(range(begin, total))
    assert begin or plan.steps == whole.steps
    assert not plan.steps[0].skipped and not plan.steps[-1].skipped
    for phase in plan.phases:
        inside = {step.index for step in phase}
        for branch in ("cond", "uncond"):
            program = residual_program(phase, branch)  # asserts that every skipped step has a source
            assert set(program.store) | set(program.use) <= inside


def test_a_branch_is_skipped_only_where_its_slots_hold_what_the_plan_expects() -> None:
    sigmas, _ = euler_schedule(12, 5.0)
    part = place(sigmas, 5.0)
    plan = planned(part, 5.0, 0.0, SkipOptions(taylorseer=TaylorSeerOptions(interval=2, retention=0.05)))
    residuals = Residuals(residual_program(plan.steps, "cond"))
    row = torch.ones(1, 2, 2)
    skipped = [step.index for step in plan.steps if step.skipped]
    assert skipped == [1, 3, 5, 7, 9]
    assert not residuals.can_skip(1)
    for step in (0, 2):
        slot = residuals.slot(step, row)
        assert slot is not None and not residuals.can_skip(step + 1), "not before it is filled"
        slot.copy_(row * step)
        residuals.filled(step)
        assert residuals.can_skip(step + 1)
    assert not residuals.can_skip(7), "4 and 6 were never computed"
    torch.testing.assert_close(residuals.reused(3), row * 3)
    torch.testing.assert_close(residuals.reused(3, row), row * 4)
    residuals.slot(4, row)  # broken off: what was in the slot is gone
    assert not residuals.can_skip(3) and not residuals.can_skip(5)


def test_what_only_our_own_loop_can_do_is_refused() -> None:
    with pytest.raises(OptionError, match="take taylorseer"):
        check_native(SkipOptions(magcache=MagCacheOptions(threshold=0.12, max_skips=2, retention=0.2)))
    for policy in POLICIES:
        check_native(policy)

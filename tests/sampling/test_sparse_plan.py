"""Sparse attention in a plan: options, refusals, estimates."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_core.config import OptionError, SparseOptions
from wan_core.config.skipping import parse_setting
from wan_core.pipeline.sources import RANDOM
from wan_core.sampling.cache.skipping import skip_forwards, skip_words
from wan_core.sampling.plan import make_plan
from wan_core.sampling.sparsity.schedule import (
    ERROR,
    SLOPE,
    attention_share,
    sparsify,
    step_cost,
    with_costs,
)

A14B = RANDOM["t2v-A14B"][0]


OPTIONS = st.builds(
    SparseOptions,
    sparsity=st.sampled_from([0.25, 0.5, 0.75, 0.875]),
    ramp=st.sampled_from([0.0, 0.3, 0.55, 1.0]),
    slope=st.booleans(),
    kernel=st.sampled_from(["auto", "math", "cudnn", "flex"]),
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "some",
        "2",
        "0.5/0.1/1",
        "0.5/x",
        "balanced",
        "0.5:rampant",
        "-0.5",
        "nan",
    ],
)
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"given|not known"):
        SparseOptions.parse(text)


@given(OPTIONS, st.integers(1, 60))
def test_first_steps_read_more(options: SparseOptions, steps: int) -> None:
    plan = make_plan(steps=steps)
    sparse_plan = sparsify(plan, options)
    ramp = max(
        min(0.5, options.sparsity), 1 - 2 * (1 - options.sparsity)
    )  # half of the blocks, or twice those of later
    assert {round(step.sparsity, 9) for step in sparse_plan.steps} <= {round(s, 9) for s in (ramp, options.sparsity)}
    assert [step.sparsity for step in sparse_plan.steps] == sorted(step.sparsity for step in sparse_plan.steps)
    assert steps - sum(s.sparsity == options.sparsity for s in sparse_plan.steps) >= (
        options.ramp * steps - 1e-6 if options.sparsity > 0.5 else 0
    )
    dense = tuple(replace(step, sparsity=0.0) for step in sparse_plan.steps)
    assert replace(sparse_plan, steps=dense, sparse=None, notes=()) == plan
    assert sparse_plan.forwards == plan.forwards


def test_the_estimate_counts_what_is_read() -> None:
    """Measured on an H200 at 720p: attention is 72 % of the work, half of the keys a forward at about 2/3."""
    assert attention_share(A14B, 75600) == pytest.approx(0.72, abs=0.01)
    assert step_cost(0.0, 0.72) == 1.0
    share = attention_share(A14B, 75600)
    for keep, seconds in ((0.5, 5.345), (0.375, 4.578), (0.25, 3.79), (0.1875, 3.378), (0.125, 2.964)):
        # Forwards without slopes, dense 7.537 s; slopes take 0.43 s.
        assert step_cost(1 - keep, share, slope=False) == pytest.approx(seconds / 7.537, rel=0.01)
        assert step_cost(1 - keep, share) == pytest.approx((seconds + 0.43) / 7.537, rel=0.01)
    assert pytest.approx((40.3 - 28.8) / 145.4, abs=0.012) == SLOPE + ERROR  # ms of a layer, beyond means alone
    dense = make_plan(steps=40)
    for name, before in (("0.5", 1.0), ("0.8125", 0.85), ("0.875", 0.65)):
        plan = with_costs(sparsify(dense, SparseOptions.parse(name)), A14B, (21, 90, 160))
        estimated = plan.estimate({"high": 1.0, "low": 1.0})
        assert estimated is not None
        assert estimated < before * 80
        assert estimated == pytest.approx(sum(s.forwards * s.cost for s in plan.steps))


def test_a_plan_shows_it_beside_what_is_skipped() -> None:
    options = parse_setting("taylorseer:2+sparse:0.75:ramp0.2")
    assert options is not None
    plan = skip_forwards(make_plan(steps=20), options, None)
    table = plan.table()
    assert "0.75:ramp0.2" in table
    for share, sparsity in (("25 %", 0.75), ("50 %", 0.5)):
        assert table.count(f"{share} of keys") == sum(s.sparsity == sparsity and s.forwards > 0 for s in plan.steps) > 0
    assert "forecast" in table
    assert "sparse 0.75:ramp0.2" in skip_words(options)
    shown = json.loads(json.dumps(plan.as_dict()))
    assert [s["sparsity"] for s in shown["steps"]] == [s.sparsity for s in plan.steps]

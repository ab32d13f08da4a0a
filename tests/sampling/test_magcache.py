"""Which steps MagCache skips: against a plain reference written from the published rule, and properties over all
inputs."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_core.config import (
    MagCacheOptions,
    SkipOptions,
    TaylorSeerOptions,
)
from wan_core.sampling.cache.curves import PUBLISHED, Curve, read_curve
from wan_core.sampling.cache.magcache import skip_magcache
from wan_core.sampling.cache.skipping import leave_out
from wan_core.sampling.plan import make_plan

CURVES = {path.stem: read_curve(path) for path in sorted(PUBLISHED.glob("*.json"))}


# ----------------------------------------------------------------------------------------------- the published rule


def reference(task: str, steps: int, split: int, cond: list, uncond: list, T: float, K: int, R: float) -> list[bool]:
    """The rule as it is published, one forward after another: which of the 2 * steps forwards are skipped. `split`: in
    forwards. Plain lists and counters, and nothing of the engine."""
    N = 2 * steps
    r = np.empty(N)
    index = np.round(np.arange(steps) * (len(cond) - 1) / max(1, steps - 1)).astype(int)
    r[0::2], r[1::2] = np.array(cond)[index], np.array(uncond)[index]
    ratio, error, count, skipped = [1.0, 1.0], [0.0, 0.0], [0, 0], []
    for cnt in range(N):
        if task == "t2v-A14B":
            eligible = not cnt < int(split * R) and not (split <= cnt <= (N - split) * R + split)
        elif task == "i2v-A14B":
            eligible = cnt >= int(split + (N - split) * R)
        else:
            eligible = cnt >= int(N * R)
        skip, side = False, cnt % 2
        if eligible:
            ratio[side] *= r[cnt]
            count[side] += 1
            error[side] += abs(1 - ratio[side])
            skip = error[side] < T and count[side] <= K
            if not skip:
                ratio[side], error[side], count[side] = 1.0, 0.0, 0
        skipped.append(skip)
    return skipped


SETTINGS = [
    ("t2v-A14B", 0.04, 2, 0.2),
    ("t2v-A14B", 0.06, 2, 0.4),
    ("t2v-A14B", 0.12, 2, 0.2),
    ("t2v-A14B", 0.24, 2, 0.1),
    ("t2v-A14B", 0.12, 4, 0.2),
    ("i2v-A14B", 0.06, 2, 0.1),
    ("i2v-A14B", 0.06, 2, 0.2),
    ("i2v-A14B", 0.12, 2, 0.2),
    ("i2v-A14B", 0.24, 2, 0.1),
    ("ti2v-5B", 0.06, 2, 0.2),
    ("ti2v-5B", 0.12, 2, 0.2),
    ("ti2v-5B", 0.06, 3, 0.2),
]


@pytest.mark.parametrize(("task", "T", "K", "R"), SETTINGS)
@pytest.mark.parametrize("steps", [None, 20, 27, 61])
def test_published_rule_is_the_reference(task, T, K, R, steps):
    plan, curve = make_plan(task=task, steps=steps), CURVES[task]
    options = MagCacheOptions(threshold=T, max_skips=K, retention=R)
    skipped = skip_magcache(plan, options, curve)
    split = 2 * len(plan.phases[0])
    expected = reference(task, len(plan.steps), split, list(curve.cond), list(curve.uncond), T, K, R)
    skips = [branch in step.skipped for step in skipped.steps for branch in ("cond", "uncond")]
    assert skips == expected
    assert skipped.forwards == expected.count(False)


@given(
    task=st.sampled_from(["t2v-A14B", "i2v-A14B", "ti2v-5B"]),
    steps=st.integers(10, 61),
    threshold=st.floats(0.01, 0.3),
    skips=st.integers(0, 5),
    retention=st.floats(0, 0.6),
)
def test_published_rule_is_the_reference_where_retention_ends_within_a_step(task, steps, threshold, skips, retention):
    """Forwards are counted, not steps: the unconditional one may be the first that may be skipped."""
    plan, curve = make_plan(task=task, steps=steps), CURVES[task]
    options = MagCacheOptions(threshold=threshold, max_skips=skips, retention=retention)
    split = 2 * len(plan.phases[0])
    numbers = list(curve.cond), list(curve.uncond), threshold, skips, retention
    wanted = iter(reference(task, steps, split, *numbers))
    computed = {}  # what the engine computes as well: a branch without a residual of the running expert
    for step in skip_magcache(plan, options, curve).steps:
        for branch in ("cond", "uncond"):
            fresh = (step.expert, branch) not in computed
            if next(wanted):
                if fresh:
                    return  # from here on the residuals differ in age
                assert branch in step.skipped
            else:
                assert branch not in step.skipped
                computed[step.expert, branch] = step.index


def test_published_curves_are_the_published_numbers():
    """Ends, lengths and the dip at the boundary, as they are in MagCache4Wan2.2."""
    t2v, i2v = CURVES["t2v-A14B"], CURVES["i2v-A14B"]
    assert (t2v.steps, t2v.high_steps, i2v.steps, i2v.high_steps) == (40, 26, 40, 15)
    assert t2v.cond[:2] == (1.0, 1.00124) and t2v.uncond[-1] == 0.80181
    assert (t2v.cond[26], t2v.uncond[26]) == (0.65523, 0.65252) == (min(t2v.cond), min(t2v.uncond))
    assert (i2v.cond[15], i2v.uncond[15]) == (0.91076, 0.91046)
    assert CURVES["ti2v-5B"].steps == CURVES["ti2v-5B-image"].steps == 50
    for task in ("t2v-A14B", "i2v-A14B"):
        assert sum(s.expert == "high" for s in make_plan(task=task).steps) == CURVES[task].high_steps


# --------------------------------------------------------------------------------------------------------- properties


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    steps = draw(st.integers(2, 60))
    ratios = st.lists(st.floats(0.3, 1.5) | st.floats(0.97, 1.01), min_size=steps, max_size=steps).map(tuple)
    high = draw(st.integers(0, steps))
    return Curve(
        task="any", source="drawn", high_steps=high, shift=5, boundary=0.9, solver="unipc", samples=1,
        cond=draw(ratios), uncond=draw(ratios),
    )  # fmt: skip


plans = st.builds(
    make_plan,
    task=st.sampled_from(["t2v-A14B", "i2v-A14B", "ti2v-5B"]),
    steps=st.integers(1, 80),
    shift=st.floats(0.5, 20),
    boundary=st.floats(0, 1, exclude_min=True),  # at 0 one transformer has no low-noise steps
    guidance_high=st.sampled_from([1.0, 3.5]),
    guidance_low=st.sampled_from([1.0, 3.0]),
)
magcaches = st.builds(
    MagCacheOptions,
    threshold=st.floats(0, 0.5) | st.just(10.0),
    max_skips=st.integers(0, 6),
    retention=st.floats(0, 1),
)


@given(plans, curves(), magcaches)
def test_properties_of_magcache(plan, curve, options):
    skipped = leave_out(plan, SkipOptions(magcache=options), curve)
    if len(plan.steps) < 10:
        assert skipped.forwards <= plan.forwards and all(not s.skipped for s in skipped.steps)
        assert any("MagCache is off" in note for note in skipped.notes)
        return
    for phase in skipped.phases:
        assert not phase[0].skipped, "the first step of a phase has nothing to reuse"
        branches_kept: set[str] = set()
        for step in phase:
            assert branches_kept.issuperset(step.skipped), "a skip needs a residual of this expert and branch"
            branches_kept |= set(step.branches) - set(step.skipped)
        assert oldest(phase) <= options.max_skips
    if options.threshold == 0 or options.max_skips == 0:
        assert skipped.forwards == sum(len(s.branches) for s in skipped.steps)


def oldest(phase) -> int:
    """The most steps that a residual is old when it stands in for its branch."""
    computed, ages = {}, [0]
    for step in phase:
        ages += [step.index - computed[branch] for branch in step.skipped]
        computed |= dict.fromkeys(set(step.branches) - set(step.skipped), step.index)
    return max(ages)


@given(plans, st.integers(1, 6), st.floats(0, 1))
def test_properties_of_taylorseer(plan, interval, retention):
    options = SkipOptions(taylorseer=TaylorSeerOptions(interval=interval, retention=retention))
    skipped = leave_out(plan, options, None)
    assert not skipped.steps[-1].skipped and not any(phase[0].skipped for phase in skipped.phases)
    for phase in skipped.phases:
        runs = [len(list(group)) for skip, group in groupby(phase, lambda s: bool(s.skipped)) if skip]
        assert max(runs, default=0) < interval
        assert all(s.action in ("reuse", "forecast") for s in phase if s.skipped)
        assert oldest(phase) < interval

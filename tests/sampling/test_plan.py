"""Plans against the published tables, and their properties over all inputs."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_core.config import OptionError, PlanNumbers
from wan_core.models.wan.families import TASKS, find_task
from wan_core.sampling.plan import SCHEDULES, make_plan
from wan_core.sampling.presets import preset_plan

# Timesteps of the official UniPC scheduler (Wan2.2/wan/utils/fm_solvers_unipc.py)
UNIPC = {
    (
        "t2v-A14B",
        40,
    ): "999 997 995 993 990 988 985 982 979 976 972 969 965 961 956 952 947 941 936 929 922 915 907 898 888 877 865 "
    "852 837 819 799 776 749 717 678 631 571 492 386 235",
    (
        "i2v-A14B",
        40,
    ): "999 994 989 983 978 972 965 959 952 944 937 929 920 911 902 892 882 870 859 846 833 818 803 786 768 749 728 "
    "706 681 654 624 591 555 514 468 416 356 288 208 113",
    (
        "ti2v-5B",
        50,
    ): "999 995 991 987 982 978 973 968 963 957 952 946 940 934 927 920 913 906 898 890 882 873 863 854 843 833 821 "
    "809 796 783 768 753 737 720 701 681 660 636 611 584 555 522 487 448 405 356 302 241 172 92",
}


@pytest.mark.parametrize(("task", "steps"), UNIPC)
def test_unipc_timesteps_are_the_official_ones(task, steps):
    plan = make_plan(task=task, steps=steps)
    assert [int(s.timestep) for s in plan.steps] == [int(t) for t in UNIPC[task, steps].split()]


@pytest.mark.parametrize(
    ("task", "steps", "high"), [("t2v-A14B", 40, 26), ("t2v-A14B", 4, 3), ("i2v-A14B", 40, 15), ("i2v-A14B", 4, 2)]
)
def test_steps_of_the_high_noise_expert(task, steps, high):
    plan = make_plan(task=task, steps=steps)
    assert sum(s.expert == "high" for s in plan.steps) == high


@pytest.mark.parametrize("task", ["t2v-A14B", "i2v-A14B", "ti2v-5B"])
def test_unipc_schedule_is_the_reference_formula_for_every_step_count(task):
    """The published tables have 40 and 50 steps; every other count is checked against the formula as the official
    scheduler writes it, in numpy."""
    for steps in range(1, 101):
        plan = make_plan(task=task, steps=steps)
        top = np.float32(1 - 1 / 1000).item()
        sigmas = np.linspace(top, 0.0, steps + 1)[:-1]
        sigmas = plan.shift * sigmas / (1 + (plan.shift - 1) * sigmas)
        assert [s.timestep for s in plan.steps] == list((sigmas * 1000).astype(np.int64))
        assert np.array_equal(np.float32(plan.sigmas), np.float32([*sigmas, 0.0]))


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 8.0, 12.0])
def test_dpmpp_and_euler_timesteps_are_the_reference_formulas(shift):
    """Cut or rounded in another place, some would differ by one and move the change of expert."""
    for steps in range(1, 101):
        even = np.linspace(1, 0, steps + 1)[:steps]
        sigmas = shift * even / (1 + (shift - 1) * even)
        dpmpp = make_plan(steps=steps, shift=shift, solver="dpm++")
        assert [s.timestep for s in dpmpp.steps] == list((sigmas * 1000).astype(np.int64))
        euler = make_plan(steps=steps, shift=shift, solver="euler")
        assert np.array_equal([s.timestep for s in euler.steps], np.float32(sigmas) * np.float32(1000))


def test_the_split_at_a_boundary_that_a_timestep_meets():
    """sigma 0.9 exactly: timestep 900 belongs to the high-noise expert, 899 would not."""
    for solver in ("dpm++", "euler"):
        plan = make_plan(task="i2v-A14B", steps=40, shift=3.0, solver=solver)
        assert sum(s.expert == "high" for s in plan.steps) == 11


def test_four_step_euler_is_the_distilled_schedule():
    plan = make_plan(task="t2v-A14B", steps=4, shift=5, solver="euler", guidance_high=1, guidance_low=1)
    assert [round(s.timestep, 1) for s in plan.steps] == [1000.0, 937.5, 833.3, 625.0]
    assert plan.forwards == 4 and not plan.guided


numbers = st.fixed_dictionaries(
    {
        "task": st.sampled_from(sorted(TASKS)),
        "steps": st.integers(1, 100),
        "shift": st.floats(0.1, 30),
        "boundary": st.floats(0, 1, exclude_min=True),
        "guidance_high": st.floats(0, 20),
        "guidance_low": st.floats(0, 20) | st.just(1.0),
        "solver": st.sampled_from(sorted(SCHEDULES)),
    }
)


@given(numbers)
def test_properties(given_numbers):
    plan = make_plan(**given_numbers)
    sigmas, twice = plan.sigmas, plan.solver == "heun"
    assert plan.count == given_numbers["steps"] and sigmas[-1] == 0
    assert len(plan.steps) == (2 * plan.count - 1 if twice else plan.count)
    assert all(a > b or (twice and a == b) for a, b in pairwise(sigmas))
    experts = [s.expert for s in plan.steps]
    assert experts == sorted(experts)  # "high" < "low": high first, and never back
    for step in plan.steps:
        assert (step.expert == "high") == (step.timestep >= plan.boundary * 1000)
        assert step.guidance == given_numbers[f"guidance_{step.expert}"]
        assert ("uncond" in step.branches) == (step.guidance != 1)
    assert plan.forwards == sum(len(s.branches) for s in plan.steps)
    assert json.loads(json.dumps(plan.as_dict()))["steps"][0]["expert"] in ("high", "low")
    assert len(plan.table().splitlines()) >= 2 + len(plan.steps)


def test_one_transformer_has_a_second_guidance_below_a_boundary():
    plan = make_plan(task="ti2v-5B", boundary=0.5, guidance_high=5.0, guidance_low=1.0)
    assert {(step.expert, step.guidance) for step in plan.steps} == {("high", 5.0), ("low", 1.0)}
    guided = PlanNumbers(preset="4-step-guided")  # guidance 1 for low-noise steps, of which there are none
    assert {step.guidance for step in preset_plan(guided, task=find_task("ti2v-5B")).steps} == {3.5}


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": 0},
        {"steps": 1001},
        {"shift": 0},
        {"shift": 1e-308},
        {"shift": float("nan")},
        {"boundary": 1.5},
        {"boundary": float("nan")},
        {"guidance_low": -1},
        {"guidance_high": float("inf")},
        {"solver": "ddim"},
        {"task": "t2v-1B"},
        {"task": "ti2v-5B", "guidance_low": 3.0},
        {"task": "ti2v-5B", "guidance_high": 5.0, "guidance_low": 3.0},
    ],
)
def test_bad_numbers_say_what_is_allowed(bad):
    with pytest.raises(OptionError, match=r"allowed|use one of|must be|from 0 to 1|give guidance_high alone"):
        make_plan(**bad)

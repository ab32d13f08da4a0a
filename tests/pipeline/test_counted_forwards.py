"""A plan says how many forwards run: what is counted in the transformer, told as progress and reported is the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.test_clips import folder, loaded, request  # noqa: F401 - a fixture
from wan_core.cli import build_parser
from wan_core.cli.inform import asked_plan
from wan_core.config import (
    LoadOptions,
    NagOptions,
    Request,
    SkipOptions,
    TaylorSeerOptions,
)
from wan_core.models.wan.families import TASKS, family_of
from wan_core.models.wan.families.animate2 import ANIMATE2_14B
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.run import Watch
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.schedule import with_costs

SEER = SkipOptions(taylorseer=TaylorSeerOptions(interval=2, retention=0.1))
ANIMATE2: tuple[dict[str, Any], ...] = (
    {"frames": 9, "guidance_high": 1.0, "guidance_low": 1.0, "steps": 6},  # a short video, once 7 for 6
    {"guidance_mode": "sequential"},
    {"guidance_mode": "batched", "pose_prompt": "a square", "pose_strength": 0.5},
    {"guidance_high": 1.0, "guidance_low": 1.0, "nag": NagOptions()},
    {"steps": 10, "skip": SEER},
    {"steps": 4, "solver": "heun"},
)
TINY: tuple[dict[str, Any], ...] = (
    {"steps": 3, "solver": "heun", "guidance_low": 1.0},
    {"steps": 12, "skip": SEER},
    {"steps": 12, "skip": SEER, "guidance_mode": "sequential"},
)


def counted(pipe: Pipeline, asked: Request) -> tuple[int, list[int], Plan, int]:
    """Runs of the first block for one video, forwards told as progress, the plan, and clips."""
    rows, told = [0], list[int]()
    for expert in dict.fromkeys(("high", "low") if pipe.models.task.two_experts else ("high",)):
        pipe.models.expert(expert).blocks[0].register_forward_pre_hook(
            lambda _, inputs: rows.__setitem__(0, rows[0] + len(inputs[0]))
        )
    result = pipe.generate(asked, Watch(step=lambda progress, _: told.append(progress.forwards)))
    return rows[0], told, result.plan, len(pipe.prepare(asked).job.clips)


@pytest.mark.parametrize("changed", ANIMATE2)
def test_animate_2_runs_what_its_plan_says(folder: Path, changed: dict[str, Any]) -> None:  # noqa: F811
    pipe = loaded(folder, "animate2")
    ran, told, plan, clips = counted(pipe, request(folder, "animate2", **changed))
    assert clips == (1 if "frames" in changed else 3)
    assert sum(told) == clips * plan.forwards == ran
    assert [step.passes for step in plan.steps] == [1] + [0] * (len(plan.steps) - 1)
    for note in [note for note in pipe.report.notes if note.startswith("forwards: ")] if plan.unskipped else []:
        assert re.match(rf"forwards: {plan.forwards} of {plan.unskipped} ", note)


@pytest.mark.parametrize("changed", TINY)
def test_the_embedded_model_runs_what_its_plan_says(changed: dict[str, Any]) -> None:
    asked = Request(**{"prompt": "a red circle", "width": 32, "height": 32, "frames": 5, **changed})
    ran, told, plan, _ = counted(Pipeline.load(LoadOptions(model="tiny", device="cpu"), request=asked), asked)
    assert sum(told) == plan.forwards == ran


def test_the_estimate_counts_the_pass_and_what_does_not_read_the_video() -> None:
    """At 720p the driving video has 21 frames of 22, and no reader: a little less than a forward."""
    latents = 22, 90, 160
    over, undriven = family_of(ANIMATE2_14B).driving_costs(ANIMATE2_14B, latents)
    assert 0.85 < over < 21 / 22 and over < undriven < 1
    options = build_parser().parse_args(["plan", "--task", "animate2-14B-distilled"])
    plan = asked_plan(options)
    assert plan.forwards == TASKS["animate2-14B-distilled"].steps + 1 and plan.latent_shape[2] == 22
    estimated = with_costs(plan, ANIMATE2_14B, latents).estimate({"high": 10.0})
    assert estimated == pytest.approx(10 * (10 + over), abs=0.01)

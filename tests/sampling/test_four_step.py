"""Presets of step-distilled weights: their numbers, when they are recognised, and a user's own numbers beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wan_core.checkpoint.save import write_safetensors
from wan_core.cli import main
from wan_core.config import LoadOptions, LoraOptions, OptionError, PlanNumbers, Request, SkipOptions, TaylorSeerOptions
from wan_core.config.file_names import file_says
from wan_core.models.wan.families import TASKS
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.sources import TINY_LORAS, own_loras
from wan_core.sampling.plan import SCHEDULES
from wan_core.sampling.presets import CHOICES, PRESETS, find_preset, preset_plan

PAIRS = tuple(TASKS[name] for name in ("t2v-A14B", "i2v-A14B", "t2v-tiny", "i2v-tiny"))


@pytest.mark.parametrize("task", PAIRS)
def test_four_steps_are_those_that_were_distilled(task):
    plan = preset_plan(PlanNumbers(preset="4-step"), task=task)
    assert [s.timestep for s in plan.steps] == pytest.approx([1000, 937.5, 2500 / 3, 625], abs=1e-3)
    assert [s.sigma for s in plan.steps] == pytest.approx([1, 0.9375, 5 / 6, 0.625], abs=1e-6)
    assert [s.expert for s in plan.steps] == ["high", "high", "low", "low"]
    assert (plan.solver, plan.shift, plan.guided, plan.forwards) == ("euler", 5, False, 4)
    assert any("preset 4-step" in note for note in plan.notes)


@settings(max_examples=20, deadline=None)
@given(
    preset=st.sampled_from(sorted(name for name, preset in PRESETS.items() if not preset.motion)),
    task=st.sampled_from(PAIRS),
    steps=st.none() | st.integers(2, 20),
    shift=st.none() | st.floats(1, 15),
    solver=st.none() | st.sampled_from(sorted(SCHEDULES)),
)
def test_the_boundary_goes_by_steps(preset, task, steps, shift, solver):
    """Half of the steps for each expert, whatever the schedule; a user's numbers stand."""
    plan = preset_plan(PlanNumbers(preset=preset, steps=steps, shift=shift, solver=solver), task=task)
    count = steps or PRESETS[preset].steps
    assert plan.count == count and plan.shift == (shift or 5) and plan.solver == (solver or "euler")
    assert [s.expert for s in plan.steps if not s.correction] == ["high"] * (count // 2) + ["low"] * (
        count - count // 2
    )
    assert plan.guidance_of("high") == PRESETS[preset].guidance_high
    assert ("uncond" in plan.steps[0].branches) == (preset == "template" or preset.endswith("guided"))
    assert preset == "template" or not any("uncond" in s.branches for s in plan.steps if s.expert == "low")


def test_an_unknown_preset_names_the_known():
    with pytest.raises(OptionError, match="4-step-guided"):
        find_preset("5-step")
    assert set(CHOICES) == {"auto", "none", *PRESETS}


def lora(path: Path) -> Path:
    write_safetensors(
        {
            "diffusion_model.blocks.0.ffn.0.lora_down.weight": torch.full((2, 128), 0.01),
            "diffusion_model.blocks.0.ffn.0.lora_up.weight": torch.full((384, 2), 0.01),
        },
        path,
        {},
    )
    return path


def test_a_pipeline_recognises_it_and_leaves_caches_off(tmp_path):
    path = lora(tmp_path / "mine_4steps.safetensors")
    request = Request(
        prompt="a red circle moving right on a blue background", width=32, height=32, frames=5,
        skip=SkipOptions(taylorseer=TaylorSeerOptions(interval=2)),
    )  # fmt: skip
    options = LoadOptions(model="tiny", device="cpu", loras=(LoraOptions(path=str(path)),))
    result = Pipeline.load(options, request=request).generate(request)
    assert len(result.plan.steps) == 4 and result.plan.forwards == 4 and result.plan.solver == "euler"
    for said in ("preset 4-step", "TaylorSeer is off"):
        assert f"{said}: the name of mine_4steps.safetensors says '4steps'" in " ".join(result.report.notes)
    assert result.report.settings["guidance"] == {"high": 1.0, "low": 1.0}


def test_command_line(tmp_path, capsys):
    path = lora(tmp_path / "mine_4steps_high.safetensors")
    assert main(["plan", "--lora", f"{path}:0.9"]) == 0
    assert "4 steps, euler, shift 5" in capsys.readouterr().out
    assert main(["plan", "--lora", f"{path}:0"]) == 0  # does not count
    assert "40 steps, unipc" in capsys.readouterr().out
    assert main(["plan", "--lora", str(path), "--preset", "none", "--steps", "7"]) == 0
    assert "7 steps, unipc" in capsys.readouterr().out
    assert main(["plan", "--preset", "8-step-guided", "--guidance", "/2"]) == 0
    assert "16 forwards" in capsys.readouterr().out
    assert main(["plan", "--lora", str(tmp_path / "absent.safetensors")]) == 2
    assert "absent.safetensors does not exist" in capsys.readouterr().err


def test_the_embedded_model_has_its_own():
    there = tuple(LoraOptions(path=str(path), expert=expert) for expert, path in TINY_LORAS.items())
    assert len(there) == 2 and all(file_says(path).steps == 4 for path in TINY_LORAS.values())
    options = LoadOptions(model="tiny")
    assert own_loras(options, "4-step").loras == there
    assert own_loras(options, "auto").loras == () == own_loras(options, "4-step", image=True).loras
    mine = LoadOptions(model="tiny", loras=(LoraOptions(path="mine.safetensors"),))
    assert own_loras(mine, "4-step") == mine

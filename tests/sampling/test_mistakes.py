"""Warnings of a plan: what can run and is probably a mistake is said before work starts, at every door; and nothing is
said of what is usual."""

from __future__ import annotations

from pathlib import Path

import pytest

from wan_core.cli import main
from wan_core.config import LoadOptions, Request, SkipOptions
from wan_core.execution.report import WARNING
from wan_core.models.wan.families import TASKS
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.build import ModelFacts, PlanRequest, SamplerRequest, build_plan, build_sampler_plan
from wan_core.sampling.native.plan import NativeModel, joined
from wan_core.sampling.plan import Plan
from wan_core.sampling.presets import PRESETS

MODEL = ("wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors", "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors")
LORAS = tuple(f"wan2.2_i2v_lightx2v_4steps_lora_v1_{expert}_noise.safetensors" for expert in ("high", "low"))
MERGED = ("TurboWan2.2-I2V-A14B-high-720P.pth", "TurboWan2.2-I2V-A14B-low-720P.pth")
UNDISTILLED, GUIDED = "no file says by its metadata or name that it is step-distilled", "is distilled for 4 steps"


def plan_of(
    models: tuple[str, str] = MODEL,
    loras: tuple[str, ...] = (),
    task: str = "i2v-A14B",
    known: bool = True,
    **asked: object,
) -> Plan:
    kind, (high, low) = TASKS[task], map(Path, models)
    facts = ModelFacts(
        task=kind, dit=kind.full_size, vae=kind.vae, high=high, low=low, loras=tuple(map(Path, loras)), all_files=known
    )
    return build_plan(PlanRequest(**asked), facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("models", "loras", "asked", "warning"),
    [
        (MODEL, (), {"steps": 4}, f"4 steps, and {UNDISTILLED}"),
        (MODEL, (), {"preset": "4-step"}, f"4 steps, and {UNDISTILLED}"),
        (MODEL, (), {"preset": "8-step", "steps": 20}, f"20 steps without guidance, and {UNDISTILLED}"),
        (MODEL, ("style.safetensors",), {"steps": 4}, UNDISTILLED),
        (MODEL, LORAS, {"steps": 20, "guidance_high": 3.5}, f"10 steps with guidance 3.5 and {LORAS[0]}"),
        (MODEL, LORAS, {"preset": "none", "steps": 20}, GUIDED),
        (MODEL, LORAS, {"guidance_low": 3.5}, f"2 steps with guidance 3.5 and {LORAS[1]}"),
        (MERGED, (), {"preset": "none", "steps": 20}, f"guidance 3.5 and {MERGED[0]}"),
        (MODEL, (), {"guidance_high": 50.0}, "guidance 50 burns colours and tears pictures: 3.5 is usual for i2v-A14B"),
        (MODEL, (), {"shift": 100.0}, "shift 100 spends nearly all steps on noise, and details stay blurred: 5 is"),
    ],
)  # fmt: skip
def test_mistakes_are_said(
    models: tuple[str, str], loras: tuple[str, ...], asked: dict[str, object], warning: str
) -> None:
    plan = plan_of(models, loras, **asked)
    assert any(warning in said for said in plan.warnings), plan.warnings
    assert plan.table().splitlines()[1] == WARNING + plan.warnings[0]
    assert plan.as_dict()["warnings"] == list(plan.warnings)


@pytest.mark.parametrize("preset", ["auto", "none", *PRESETS])
@pytest.mark.parametrize("task", ["t2v-A14B", "i2v-A14B", "ti2v-5B", "vace-14B", "animate-14B"])
def test_nothing_is_said_of_what_is_usual(preset: str, task: str) -> None:
    steps = {"template": 4}.get(preset)
    loras = () if preset in ("auto", "none") else LORAS
    plan = plan_of(loras=loras, task=task, preset=preset, steps=steps)
    assert plan.warnings == () and "warnings" not in plan.as_dict()


def test_samplers_of_comfyui_warn_of_numbers() -> None:
    task = TASKS["t2v-A14B"]
    asked = SamplerRequest(
        sigmas=(1.0, 0.9, 0.0), solver="euler", guidance=50.0, branches=("cond", "uncond"), skip=SkipOptions()
    )
    plan, _ = build_sampler_plan(asked, NativeModel("WanModel", task.full_size, task, None, 100.0))
    assert len(plan.warnings) == 2 == len(joined([plan, plan]).warnings)


def test_every_door_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "tiny", "--steps", "4"]) == 0
    assert f"{WARNING}4 steps, and {UNDISTILLED}" in capsys.readouterr().out
    request = Request(prompt="a red circle", steps=4, width=64, height=64, frames=5)
    report = Pipeline.load(LoadOptions(model="tiny", device="cpu")).prepare(request).report
    assert report.warnings[0].startswith("4 steps, and") and report.warning_lines()[0] in report.text()

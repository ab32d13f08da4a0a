"""Phases of a run in which LoRAs have other strengths: the plan, its refusals, and runs that equal the phases one by
one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from wan_core.checkpoint import load_dit
from wan_core.checkpoint.save import save
from wan_core.cli import build_parser, main
from wan_core.cli.prompt_file import read_list
from wan_core.config import (
    LoadOptions,
    LoraOptions,
    LoraShares,
    MotionOptions,
    OptionError,
    Request,
    SkipOptions,
    SparseOptions,
    TaylorSeerOptions,
)
from wan_core.models.wan.families import TASKS
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.denoise import sample_latents
from wan_core.pipeline.encode import encode_text
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.settings import find_quantization
from wan_core.pipeline.sources import TINY, TINY_LORAS
from wan_core.sampling.build import ModelFacts, PlanRequest, build_plan
from wan_core.sampling.denoise import Ready
from wan_core.sampling.plan import Plan
from wan_core.sampling.plan_drawing import draw_plan
from wan_core.sampling.steps import Expert, lora_share

LORAS = tuple(LoraOptions(path=str(path), expert=expert) for expert, path in TINY_LORAS.items())
SMALL = {"prompt": "a red circle moving right on a blue background", "width": 64, "height": 64, "frames": 5}


def plan_of(task: str = "i2v-A14B", loras: tuple[str, ...] = (), all_files: bool = False, **fields: object) -> Plan:
    kind = TASKS[task]
    files = {"loras": tuple(map(Path, loras)), "all_files": all_files}
    facts = ModelFacts(task=kind, dit=kind.full_size, vae=kind.vae, **files)  # type: ignore[arg-type]
    return build_plan(PlanRequest(**fields), facts)  # type: ignore[arg-type]


def phases(plan: Plan) -> list[tuple[int, str, float, tuple[tuple[str, float], ...]]]:
    return [(len(phase), phase[0].expert, phase[0].guidance, phase[0].loras) for phase in plan.phases]


@pytest.mark.parametrize(
    ("task", "preset", "counts", "shift"),
    [
        ("i2v-A14B", "motion", [1, 2, 1], 5),
        ("i2v-A14B", "8-step-motion", [1, 4, 3], 5),
        ("t2v-A14B", "motion", [1, 1, 2], 3),
        ("t2v-A14B", "8-step-motion", [1, 3, 4], 3),
        ("ti2v-5B", "8-step-motion", [1, 7], 5),
    ],
)
def test_motion_has_the_published_thresholds(task: str, preset: str, counts: list[int], shift: float) -> None:
    plan = plan_of(task, preset=preset)
    found_phases = phases(plan)
    assert [one[0] for one in found_phases] == counts and plan.shift == shift and plan.solver == "euler"
    assert found_phases[0][1:3] == ("high", 3.5) and {one[2] for one in found_phases[1:]} == {1.0}
    assert found_phases[0][3] and not any(one[3] for one in found_phases[1:])
    assert plan.forwards == plan.count + 1
    assert "phases: 1 high-noise step guided 3.5" in plan.table() and "---- LoRAs:" in plan.table()


def test_strengths_of_each_phase() -> None:
    asked = LoraShares.parse("high=0;1;0"), LoraShares.parse("low=0;0;0.5"), LoraShares.parse("style=0.5")
    plan = plan_of(preset="8-step-motion", lora_strengths=asked, loras=("a.safetensors", "style.safetensors"))
    shares = [[lora_share(phase[0].loras, phase[0].expert, name) for name in ("a", "style")] for phase in plan.phases]
    assert shares == [[0, 0.5], [1, 0.5], [0.5, 0.5]]
    two = plan_of("t2v-A14B", preset="4-step", lora_strengths=(LoraShares.parse("all=0.5;1"),))
    assert [phase[0].loras for phase in two.phases] == [(("all", 0.5),), ()]


FILES = ("x_lightx2v_4steps_high.safetensors", "Style.safetensors", "detail_style_v2.safetensors")


@pytest.mark.parametrize("known", [True, False])
def test_the_last_strength_that_is_given_of_a_lora_holds(known: bool) -> None:
    """1 as any other; a step has an entry only where it decides the strength of a LoRA."""
    draw = random.Random(5)
    for _ in range(400):
        names = draw.choices(("all", "high", "low", "style", "lightx2v", "detail"), k=draw.randint(1, 5))
        asked = [LoraShares(of=name, shares=tuple(draw.choices((0.0, 0.5, 1.0), k=2))) for name in names]
        files = FILES if known else ()
        plan = plan_of("t2v-A14B", preset="4-step", lora_strengths=tuple(asked), loras=files)
        for number, expert in enumerate(("high", "low")):
            entries = [(one.of, one.at(number)) for one in asked if one.of not in ("high", "low") or one.of == expert]
            step = next(step for step in plan.steps if step.expert == expert)
            for file in files or (*names, "another"):
                last = [share for of, share in entries if of in ("all", expert) or of in file.lower()][-1:] or [1.0]
                assert lora_share(step.loras, step.expert, file) == last[0], (asked, file)
            assert set(step.loras) <= set(entries)
            for file in FILES:
                mine = [share for of, share in step.loras if of in ("all", expert) or of in file.lower()]
                assert mine[:1] != [1.0], "a share of 1 overrides another, or is left out"


def test_one_overrides_what_motion_leaves_out() -> None:
    asked = (LoraShares.parse("lightx2v=1;1;1"),)
    plan = plan_of(preset="8-step-motion", lora_strengths=asked, loras=FILES)
    assert not any(step.loras for step in plan.steps) and plan.steps[0].guidance == 3.5
    assert plan.notes[-1].startswith("motion: every LoRA has the same strength in the guided steps")
    half = LoraShares.parse("all=0.5"), LoraShares.parse("style=1")
    plan = plan_of("t2v-A14B", preset="4-step", lora_strengths=half, loras=FILES)
    assert "x 0.5, style x 1" in plan.table()


def test_a_threshold_is_a_share_of_the_noise_or_a_timestep() -> None:
    assert phases(plan_of(preset="8-step", motion=MotionOptions.parse("0.93/2"))) == phases(
        plan_of(preset="8-step", motion=MotionOptions.parse("930/2"))
    )
    assert plan_of(preset="8-step", motion=MotionOptions.parse("0.93/2")).steps[2].guidance == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"preset": "motion", "steps": 2}, "3 phases given .* for 2 steps .* low-noise"),
        ({"preset": "4-step", "motion": MotionOptions(above=0.5)}, "3 phases given"),
        ({"preset": "motion", "sigmas": [0.9, 0.6, 0.3, 0.0]}, "none is a guided one"),
        ({"preset": "4-step", "lora_strengths": (LoraShares(of="high", shares=(0, 1, 0)),)}, "3 strengths .* 2 phases"),
        ({"preset": "motion", "loras": ("style.safetensors",)}, "no LoRA given is one by its name"),
        ({"lora_strengths": (LoraShares(of="all", shares=(0.5,)),), "all_files": True}, "and the run has no LoRA"),
        ({"preset": "motion", "all_files": True}, "no LoRA given is one by its name"),
        (
            {
                "preset": "motion",
                "loras": ("style.safetensors",),
                "lora_strengths": (LoraShares(of="style", shares=(0.5,)),),
            },
            "no LoRA given is one by its name",
        ),
        (
            {"loras": ("style.safetensors",), "lora_strengths": (LoraShares(of="x", shares=(0, 1)),)},
            "of the files style.safetensors",
        ),
    ],
)
def test_phases_that_cannot_be_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plan_of(**fields)  # type: ignore[arg-type]


def test_steps_that_reuse_stay_within_a_phase() -> None:
    """What was computed with other strengths is not reused; a pattern and a curve go by experts as before."""
    skip = SkipOptions(taylorseer=TaylorSeerOptions(interval=4, retention=0))
    plan = plan_of(preset="8-step-motion", steps=20, motion=MotionOptions(above=0.93), skip=skip)
    for phase in plan.phases:
        assert not phase[0].skipped and len(phase) > 1
    assert any(step.skipped for step in plan.steps)


def test_the_picture_and_lists_and_the_command_line_have_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["plan", "--task", "i2v-A14B", "--preset", "4-step", "--motion=985", "--lora-strength=high=0;1"]) == 0
    assert "(high x 0)" in capsys.readouterr().out
    plan = plan_of(preset="8-step-motion")
    pictures = [np.asarray(draw_plan(one)) for one in (plan, plan_of(preset="8-step", boundary=0.8))]
    assert (pictures[0] != pictures[1]).any(-1)[364:382, 56:160].any()
    listed = tmp_path / "list.jsonl"
    lines = [{"prompt": "a", "lora_strengths": ["high=0;1", "low=1;0.5"]}, {"prompt": "b", "motion": "0.9/2"}]
    listed.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["generate", "--model=tiny", f"--prompts={listed}", "--out=x.mp4"]
    videos = [one.request for one in read_list(listed, build_parser().parse_args(arguments), LoadOptions(model="tiny"))]
    assert videos[0].lora_strengths == (
        LoraShares(of="high", shares=(0, 1)),
        LoraShares(of="low", shares=(1, 0.5)),
    )
    assert videos[1].motion == MotionOptions(above=0.9, guidance=2)


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Both experts, in their own precision, FP8 and INT8."""
    folder, paths = tmp_path_factory.mktemp("experts"), {"own": {}}
    paths["own"] = {expert: str(TINY / f"t2v_{expert}.safetensors") for expert in ("high", "low")}
    for precision in ("fp8", "int8"):
        quantization = find_quantization(precision, torch.device("cpu"))
        paths[precision] = {}
        for expert, path in paths["own"].items():
            file = folder / f"{precision}_{expert}.safetensors"
            save(load_dit(Path(path), dtype=torch.float32, quantization=quantization), file)
            paths[precision][expert] = str(file)
    return paths


def load(files: dict[str, str], loras: tuple[LoraOptions, ...] = LORAS, **options: object) -> Pipeline:
    fields = {"model": "tiny", "device": "cpu", "loras": loras, **files, **options}
    return Pipeline.load(LoadOptions(**fields))  # type: ignore[arg-type]


class Phases(Ready):
    """Experts with and without their LoRAs, each loaded as it is."""

    def __init__(self, with_loras: Pipeline, without: Pipeline) -> None:
        super().__init__(with_loras.models.expert)
        self.without = without

    def acquire(self, expert: Expert, loras: object = ()) -> WanModel:
        return self.without.models.expert(expert) if loras else self.find(expert)


@torch.no_grad()
def one_by_one(with_loras: Pipeline, without: Pipeline, request: Request) -> Tensor:
    run = with_loras.prepare(request)
    start, models = run.job.start(), run.models
    noise = start.sample(run.job.plan, models.vae_config, models.device)
    owner, text = Phases(with_loras, without), encode_text(run)
    return sample_latents(run.job.plan, owner, text, noise, models.vae_config, run.report, start=start)


@pytest.mark.parametrize(
    ("stored", "options"),
    [
        ("fp8", {"lora_mode": "merge"}),
        ("int8", {"lora_mode": "attach"}),
    ],
)
def test_phases_are_runs_of_models_with_and_without_loras(
    files: dict[str, dict[str, str]], stored: str, options: dict[str, object]
) -> None:
    """Twice in a row, and a run without phases after it is as if there had been none."""
    request, plain = (Request(preset=preset, **SMALL) for preset in ("motion", "4-step"))  # type: ignore[arg-type]
    pipe, with_loras, without = (load(files[stored], loras, **options) for loras in (LORAS, LORAS, ()))
    expected = one_by_one(with_loras, without, request)
    first, second = (pipe.generate(request).latents for _ in range(2))
    close = {"rtol": 0, "atol": 0} if options.get("lora_mode") == "merge" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(first, expected.cpu(), **close)
    assert torch.equal(first, second)
    torch.testing.assert_close(pipe.generate(plain).latents, with_loras.generate(plain).latents, rtol=0, atol=0)
    assert (first - one_by_one(with_loras, with_loras, request).cpu()).abs().max() > 0.01


def test_a_run_with_sparse_attention_and_skipped_steps(files: dict[str, dict[str, str]]) -> None:
    skip = SkipOptions(
        sparse=SparseOptions(sparsity=0.5),
        taylorseer=TaylorSeerOptions(interval=2, retention=0),
    )
    request = Request(preset="motion", steps=12, motion=MotionOptions(above=0.93), skip=skip, **SMALL)  # type: ignore[arg-type]
    pipe, with_loras, without = (load(files["own"], loras) for loras in (LORAS, LORAS, ()))
    latents = pipe.generate(request).latents
    assert torch.equal(latents, one_by_one(with_loras, without, request).cpu())


def test_merged_into_packed_weights_they_cannot_change(files: dict[str, dict[str, str]]) -> None:
    pipe = load(files["int8"], lora_mode="merge")
    with pytest.raises(OptionError, match="--lora-mode attach"):
        pipe.generate(Request(preset="motion", **SMALL))  # type: ignore[arg-type]

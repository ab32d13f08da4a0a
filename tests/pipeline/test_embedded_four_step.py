"""The embedded model in four steps: its LoRAs are found, are what was trained, and keep captions true.

The full comparison, 240 held-out captions and seeds, is benchmarks/results/distilled-*.json; here a sample of it that a
CPU makes in seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tools.tiny.clips import held_out_scenes
from wan_core.checkpoint import load_dit, open_checkpoint
from wan_core.config import LoadOptions, LoraOptions, Request
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.sources import TINY_LORAS, own_loras
from wan_core.sampling.plan import make_plan
from wan_lab.metrics import judge

FOUR = Request(prompt="a red circle moving left on a blue background", preset="4-step")
TRAINED = make_plan(task="t2v-tiny", steps=4, solver="euler", shift=5.0, guidance_high=1.0, guidance_low=1.0)
SAMPLE = [(n, held_out_scenes(18)[n]) for n in (11, 16, 17)]  # without the LoRAs none comes out right in four steps


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline.load(LoadOptions(model="tiny", device="cpu"), request=FOUR)


def test_four_steps_keep_captions_true(pipe: Pipeline) -> None:
    assert captions_true(pipe) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["merge", "attach"])
@pytest.mark.parametrize("precision", ["checkpoint", "fp8"])
def test_four_steps_keep_captions_true_on_a_gpu(precision: str, mode: str) -> None:
    options = LoadOptions(model="tiny", device="cuda", precision=precision, lora_mode=mode)
    assert captions_true(Pipeline.load(options, request=FOUR)) >= 2


def captions_true(pipe: Pipeline) -> int:
    """How many captions of the sample come true, with the seeds of the committed comparison."""
    right = 0
    for number, scene in SAMPLE:
        request = Request(prompt=scene.caption, preset="4-step", seed=10_000 + number)
        right += judge(torch.from_numpy(pipe.generate(request).frames), scene).all_true
    return right


def merge_lora(expert: WanModel, path: Path) -> None:
    """Add a file's factors to the weights of `expert`, by the formula of the LoRA paper."""
    opened = open_checkpoint(path)
    with torch.no_grad():
        tensors = {name: opened.read(name).float() for name in opened.tensors}
    with torch.no_grad():
        for name in [n.removesuffix(".alpha") for n in tensors if n.endswith(".alpha")]:
            down, up = (tensors[f"{name}.lora_{part}.weight"] for part in ("down", "up"))
            weight = expert.get_parameter(f"{name.removeprefix('diffusion_model.')}.weight")
            weight += tensors[f"{name}.alpha"] / len(down) * (up @ down)


@pytest.mark.parametrize("mode", ["merge", "attach"])
def test_the_engine_makes_of_the_files_what_training_made(tiny_assets: Path, mode: str, pipe: Pipeline) -> None:
    models = pipe.models
    if mode == "attach":
        models = Pipeline.load(LoadOptions(model="tiny", device="cpu", lora_mode=mode), request=FOUR).models
    draw = torch.Generator().manual_seed(1)
    noise, rows = torch.randn(1, 16, 2, 4, 4, generator=draw), torch.randn(1, 7, 64, generator=draw)
    for expert, path in TINY_LORAS.items():
        plain = load_dit(tiny_assets / f"t2v_{expert}.safetensors", dtype=torch.float32)
        trained = load_dit(tiny_assets / f"t2v_{expert}.safetensors", dtype=torch.float32)
        merge_lora(trained, path)
        with torch.no_grad():
            told = [net(noise, torch.tensor([800.0]), rows) for net in (models.expert(expert), trained, plain)]
        assert (told[1] - told[2]).abs().mean() > 0.05, "the LoRA does nothing: nothing was compared"
        torch.testing.assert_close(told[0], told[1], rtol=0, atol=1e-4)


def test_they_come_with_a_preset_for_few_steps_and_only_then() -> None:
    tiny = LoadOptions(model="tiny")
    for preset in ("4-step", "6-step", "8-step-guided"):
        assert [(lora.expert, Path(lora.path)) for lora in own_loras(tiny, preset).loras] == [*TINY_LORAS.items()]
    mine = LoadOptions(model="tiny", loras=(LoraOptions(path="mine.safetensors"),))
    others = (LoadOptions(model="random:t2v-A14B"), LoadOptions(model="tiny", high="mine.safetensors"), mine)
    assert own_loras(tiny, "auto") is tiny and own_loras(tiny, "none") is tiny
    assert own_loras(tiny, "4-step", image=True) is tiny, "they are for text-to-video"
    assert all(own_loras(options, "4-step") is options for options in others)


def test_the_steps_are_those_that_were_distilled(pipe: Pipeline) -> None:
    plan = pipe.prepare(FOUR).job.plan
    assert [(s.timestep, s.sigma, s.expert) for s in plan.steps] == [
        (s.timestep, s.sigma, s.expert) for s in TRAINED.steps
    ]
    assert plan.forwards == 4 and plan.solver == "euler"

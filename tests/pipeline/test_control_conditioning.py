"""What ComfyUI's nodes for VACE and Fun give -> what the transformers take, and what is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.animate_references import draw_weights
from tests.control_references import CONFIGS
from wan_core.config import OptionError, SkipOptions, TaylorSeerOptions
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families import check_keys, family_of, find_task, image_task
from wan_core.pipeline.comfy_conditioning import join
from wan_core.pipeline.model_parts import Parts
from wan_core.pipeline.sources import find_experts
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.plan import Plan, make_plan
from wan_core.workers.wire import unpack

T, Y, X = 3, 4, 6
LATENT = {"samples": torch.zeros(1, 16, T, Y, X)}
SEEN = SimpleNamespace(penultimate_hidden_states=torch.full((1, 257, 1280), 0.5))
VACE = {"vace_frames": [torch.ones(1, 32, T, Y, X)], "vace_mask": [torch.ones(1, 64, T, Y, X)], "vace_strength": [0.5]}
CONTROL = {
    "concat_latent_image": torch.ones(1, 32, T, Y, X), "concat_mask": torch.zeros(1, 4, T, Y, X),
    "concat_mask_index": 16,
}  # fmt: skip
CAMERA = {"concat_latent_image": torch.ones(1, 16, T, Y, X), "concat_mask": torch.zeros(1, 4, T, Y, X)}


def read(task: str, extras: dict[str, Any], latent: dict[str, Any] = LATENT) -> dict[str, Any]:
    task_of_name = find_task(task)
    check_keys(family_of(task_of_name), "positive", extras)
    return family_of(task_of_name).read_conditioning(task_of_name, VAE_21, extras, latent)


def test_vace_reads_every_control_video():
    inputs = read("vace-14B", {key: value * 3 for key, value in VACE.items()})["inputs"]
    assert inputs["control"].shape == (1, 3, 96, T, Y, X) and inputs["control_scale"].tolist() == [[0.5] * 3]
    raw = VAE_21.normalise(torch.ones(1, 16, T, Y, X))
    assert torch.allclose(inputs["control"][:, 2, :16], raw) and torch.allclose(inputs["control"][:, 0, 16:32], raw)
    nothing = read("vace-A14B", {})["inputs"]["control"]
    assert torch.equal(nothing[:, 0, 32:], torch.ones(1, 64, T, Y, X))
    assert torch.allclose(nothing[:, 0, :16], VAE_21.normalise(torch.zeros(1, 16, T, Y, X)))


def test_control_camera_and_inpaint_read_their_channels():
    reference = torch.full((1, 16, 1, Y, X), 2.0)
    read_inputs = read("fun-control-A14B", {**CONTROL, "reference_latents": [reference]})
    assert (
        read_inputs["concat"].shape == (1, 36, T, Y, X) and (read_inputs["concat"][:, 16:20] == 1).all()
    )  # known, after control
    assert torch.equal(read_inputs["inputs"]["reference"], VAE_21.normalise(reference)[:, :, 0])
    older = read("fun-control-14B", {"concat_latent_image": CONTROL["concat_latent_image"], "clip_vision_output": SEEN})
    assert older["concat"].shape == (1, 32, T, Y, X) and older["image_features"].shape == (1, 257, 1280)
    rays = torch.ones(1, 24, T, 8 * Y, 8 * X)
    assert read("camera-A14B", {**CAMERA, "camera_conditions": rays})["inputs"]["camera"] is rays
    assert read("camera-A14B", {})["concat"].shape == (1, 20, T, Y, X)
    assert read("camera-14B", {**CAMERA, "clip_vision_output": SEEN})["concat"].shape == (1, 16, T, Y, X)


@pytest.mark.parametrize(
    ("task", "extras", "message"),
    [
        ("vace-14B", {**VACE, "vace_frames": [torch.ones(1, 32, T + 1, Y, X)]}, "reference picture in all of them"),
        ("vace-14B", {**VACE, "vace_mask": [torch.ones(1, 64, T, Y, X + 1)]}, "a mask of"),
        ("vace-14B", {**VACE, "vace_strength": [1.0, 1.0]}, "1 control videos, 1 masks and 2 strengths"),
        ("vace-14B", {**VACE, "concat_latent_image": torch.ones(1, 16, T, Y, X)}, "carries concat_latent_image"),
        ("fun-control-A14B", {}, "connect Wan22FunControlToVideo"),
        ("fun-control-A14B", {**CONTROL, "concat_mask_index": None}, "not the node of Wan 2.1"),
        ("fun-control-A14B", {**CONTROL, "concat_latent_image": torch.ones(1, 16, T, Y, X)}, "latents of"),
        ("fun-control-A14B", {**CONTROL, "reference_latents": [torch.ones(1, 16, 1, Y, X)] * 2}, "takes one"),
        ("fun-control-A14B", {**CONTROL, "reference_latents": [torch.ones(1, 16, 1, Y, X + 2)]}, "latents of"),
        ("fun-control-14B", {"concat_latent_image": CONTROL["concat_latent_image"]}, "needs CLIP features"),
        ("camera-A14B", {"camera_conditions": torch.ones(1, 24, T, 8 * Y, 8)}, "WanCameraEmbedding the size"),
        ("camera-A14B", {"vace_frames": []}, "carries vace_frames"),
        ("t2v-A14B", VACE, "carries vace_frames, vace_mask, vace_strength"),
        ("i2v-A14B", {**CAMERA, "camera_conditions": torch.ones(1)}, "carries camera_conditions"),
    ],
)
def test_what_does_not_fit_is_refused(task, extras, message):
    with pytest.raises(OptionError, match=message):
        read(task, extras)


@pytest.mark.parametrize("task", ["vace-14B", "fun-control-A14B", "camera-A14B"])
def test_known_frames_as_latents_are_refused(task):
    mask = torch.ones(1, 1, T, Y, X)
    mask[:, :, 0] = 0
    extras = CONTROL if task.startswith("fun") else {}
    with pytest.raises(OptionError, match="takes no known frame as latents"):
        read(task, extras, {**LATENT, "noise_mask": mask})


def test_lists_of_both_prompts_are_compared_by_what_they_hold(tmp_path):
    """ComfyUI's nodes make a list for each of `positive` and `negative`."""
    experts, plan = vace_experts(tmp_path), make_plan(task="vace-14B", steps=2)
    rows = torch.zeros(1, 5, 24)
    positive, negative = ([[rows, {key: list(value) for key, value in VACE.items()}]] for _ in range(2))
    inputs = join(positive, negative, LATENT, experts, plan).conditioning.inputs
    assert inputs["control"].shape == (1, 1, 96, T, Y, X)
    with pytest.raises(OptionError, match="`negative` carries vace_frames, vace_mask, vace_strength, and `positive`"):
        join([[rows, {}]], negative, LATENT, experts, plan)
    without = replace(plan, steps=tuple(replace(step, branches=("cond",), guidance=1.0) for step in plan.steps))
    assert join([[rows, {}]], negative, LATENT, experts, without).conditioning.inputs, "nothing reads the negative one"
    negative[0][1]["vace_strength"] = [0.5, 0.5]
    with pytest.raises(OptionError, match="1 control videos, 1 masks and 2 strengths"):
        join(positive, negative, LATENT, replace(experts), plan)


def vace_experts(folder: Path) -> Parts:
    path = folder / "wan_vace.safetensors"
    save_file(draw_weights(CONFIGS["vace"]), path, {"num_heads": "2"})
    return find_experts(path)


def test_control_of_the_positive_prompt_alone_is_not_that_of_the_negative_one(tmp_path):
    """ComfyUI's rule: the negative prompt then has nothing that stays, and all to generate, with a strength of 1."""
    plan, rows = make_plan(task="vace-14B", steps=2), torch.zeros(1, 5, 24)
    positive = [[rows, {key: value * 2 for key, value in VACE.items()}]]
    conditioning = join(positive, [[rows, {}]], LATENT, vace_experts(tmp_path), plan).conditioning
    assert conditioning.inputs["control"].shape[1] == 2 and conditioning.uncond_inputs["control"].shape[1] == 1
    assert torch.equal(conditioning.uncond_inputs["control"], read("vace-14B", {})["inputs"]["control"])
    both = conditioning.family_inputs(["cond", "uncond"], 1)
    assert both["control"].shape == (2, 2, 96, T, Y, X) and both["control_scale"].tolist() == [[0.5, 0.5], [1, 0]]
    same = join(positive, positive, LATENT, vace_experts(tmp_path), plan).conditioning
    assert not same.uncond_inputs and same.family_inputs(["cond", "uncond"], 1)["control"].shape[0] == 1


def test_strengths_that_change_during_the_run_are_in_the_plan(tmp_path):
    """Ranges come as ConditioningSetTimestepRange and ConditioningCombine make them."""
    experts, plan, rows = vace_experts(tmp_path), make_plan(task="vace-14B", steps=10, shift=1.0), torch.zeros(1, 5, 24)

    def prompt(*strengths: float) -> list[Any]:
        n = len(strengths)
        times = [{"start_percent": i / n, "end_percent": (i + 1) / n} for i in range(n)]
        return [[rows, {**VACE, "vace_strength": [s], **t}] for s, t in zip(strengths, times, strict=True)]

    both = prompt(0.7, 0.0), prompt(0.7, 0.0)
    joined = join(*both, LATENT, experts, plan)
    assert [step.control for step in joined.plan.steps] == [(0.7,)] * 5 + [(0.0,)] * 5
    assert joined.conditioning.inputs["control_scale"].tolist() == [[1.0]] and not joined.conditioning.uncond_inputs
    assert unpack(Plan, json.loads(json.dumps(asdict(joined.plan)))) == joined.plan
    assert "control 0.7" in joined.plan.table() and "control 0" in joined.plan.table()
    with pytest.raises(OptionError, match="those of `positive` and `negative` differ"):
        join(both[0], prompt(0.7, 0.5), LATENT, experts, plan)
    taylorseer = TaylorSeerOptions(interval=2, retention=0.2)
    skipping = skip_forwards(plan, SkipOptions(taylorseer=taylorseer), None, None)
    assert any(step.skipped for step in skipping.steps)
    with pytest.raises(OptionError, match="leave out step caching"):
        join(*both, LATENT, experts, skipping)


def test_these_tasks_are_not_taken_for_image_to_video():
    assert image_task(16).name == "i2v-A14B"

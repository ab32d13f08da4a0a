"""Clips of every family from the conditioning of ComfyUI's own nodes: our sampling and ComfyUI's."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests import comfy_animate_clip, comfy_control_clip, comfy_sound_clip
from tests.animate_references import draw_weights
from tests.comfyui import find_comfyui, find_newer_comfyui, python_of
from tests.denoised import denoise
from wan_core.checkpoint import load_dit
from wan_core.models.wan.families.fun.camera import camera_rays, read_camera
from wan_core.models.wan.families.s2v import COMFYUI_POSITIONS
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.comfy_conditioning import join
from wan_core.pipeline.model_parts import Parts
from wan_core.pipeline.sources import find_experts
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.plan import Plan

pytestmark = [pytest.mark.comfy, pytest.mark.slow]
ALIKE = 1e-3


def made_by(checkout: Path, name: str, out: Path, *arguments: object) -> Any:
    """What the script of this name makes in ComfyUI's Python."""
    script = Path(__file__).parents[1] / f"comfy_{name}_clip.py"
    command = [python_of(checkout), script, checkout, *arguments[:1], out, *arguments[1:]]
    process = subprocess.run(command, timeout=600, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return torch.load(out)


def with_objects(*conditionings: list[Any]) -> list[Any]:
    """With CLIP_VISION_OUTPUT in the place of its tensors, one object for each in all of them."""
    seen: dict[int, SimpleNamespace] = {}

    def whole(key: str, value: Any) -> Any:
        if key not in ("clip_vision_output", "clip_vision_output_pose"):
            return value
        return seen.setdefault(value.data_ptr(), SimpleNamespace(penultimate_hidden_states=value))

    return [[[rows, {k: whole(k, v) for k, v in e.items()}] for rows, e in one] for one in conditionings]


@torch.no_grad()
def difference(
    clip: dict[str, Any], experts: Parts, models: Callable[[str], WanModel], plan: Plan, seed: int
) -> tuple[float, Any]:
    """The relative difference of our latents from ComfyUI's; and what was read of its conditioning."""
    joined = join(*with_objects(clip["positive"], clip["negative"]), clip["latent"], experts, plan)
    noise = draw_noise(seed, tuple(clip["latent"]["samples"].shape))
    latents = denoise(joined.plan, models, joined.conditioning, noise)
    decoded = experts.vae.denormalise(latents)
    return float((decoded - clip["made"]).norm() / clip["made"].norm()), joined


@pytest.mark.parametrize(
    ("family", "part", "driven"),
    [("animate", (), 2), ("animate2", (), 2), ("animate2", ("0", "0.6"), 4), ("animate2", ("0.2", "0.8"), 3)],
)
def test_animate(family: str, part: tuple[str, ...], driven: int, tmp_path: Path) -> None:
    """But for what the reference does and ComfyUI does not: a block that the negative prompt's branch leaves out. part:
    of the run, in which the driving video is read."""
    checkout = find_newer_comfyui() if family == "animate2" else find_comfyui()
    clip = made_by(checkout, "animate", tmp_path / "clip.pt", family, *part)
    path = tmp_path / "wan_model.safetensors"
    metadata = comfy_animate_clip.METADATA if family == "animate2" else None
    save_file(draw_weights(comfy_animate_clip.CONFIGS[family]), path, metadata)
    experts, model = find_experts(path), load_dit(path, dtype=torch.float32)
    assert experts.task.family == family and len(model.blocks) < 10  # none of them is the one that is left out
    plan = comfy_animate_clip.plan_of(comfy_animate_clip.WINDOWED if part else 2)
    distance, joined = difference(clip, experts, lambda _: model, plan, comfy_animate_clip.SEED)
    assert sum(not step.undriven for step in joined.plan.steps) == driven and distance < ALIKE


@pytest.fixture(scope="module")
def control_clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return made_by(find_comfyui(), "control", tmp_path_factory.mktemp("clips") / "clips.pt")


@pytest.mark.parametrize("name", comfy_control_clip.CASES)
def test_control(name: str, control_clips: dict[str, Any], tmp_path: Path) -> None:
    """VACE chained and with both experts, with masks, strengths and references; Fun control, inpaint and camera."""
    case = comfy_control_clip.CASES[name]
    plan = comfy_control_clip.plan_of(case)
    assert len(plan.phases) == (2 if case.task.endswith("A14B") else 1)
    models, paths = {}, []
    for expert, weights in comfy_control_clip.weights_of(case).items():
        paths.append(tmp_path / f"wan_{expert}_noise.safetensors")
        save_file(weights, paths[-1])
        models[expert] = load_dit(paths[-1], dtype=torch.float32)
    experts = find_experts(*paths)
    assert experts.task.family == case.config.family
    assert difference(control_clips[name], experts, models.__getitem__, plan, comfy_control_clip.SEED)[0] < ALIKE


def test_a_camera_moves_as_comfyuis_does(control_clips: dict[str, Any]) -> None:
    for (theirs, size), rays in control_clips["rays"].items():
        camera = read_camera(f"{comfy_control_clip.MOTIONS[theirs]}:1.3", comfy_control_clip.LENGTH)
        assert torch.equal(camera_rays(camera, *size), rays), theirs


def test_sound(tmp_path: Path) -> None:
    """With ComfyUI's positions of motion frames; with the reference's, the video is another."""
    path = tmp_path / "wan_model.safetensors"
    save_file(draw_weights(comfy_sound_clip.CONFIG), path)
    experts, model = find_experts(path), load_dit(path, dtype=torch.float32)
    for clip in made_by(find_comfyui(), "sound", tmp_path / "clips.pt"):
        for asked, least, most in ((True, 0, ALIKE), (False, ALIKE, 1)):
            positive = [[rows, {**extras, COMFYUI_POSITIONS: asked}] for rows, extras in clip["positive"]]
            plan, changed = comfy_sound_clip.plan_of(), {**clip, "positive": positive}
            distance, joined = difference(changed, experts, lambda _: model, plan, comfy_sound_clip.SEED)
            assert {"audio", "reference", "motion", "pose"} <= joined.conditioning.inputs.keys()
            assert least <= distance < most

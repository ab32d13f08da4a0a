"""Clips of VACE and Fun from the conditioning of ComfyUI's own nodes: our sampling and ComfyUI's."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.comfy_control_clip import CASES, LENGTH, MOTIONS, SEED, plan_of, weights_of
from tests.comfyui import find_comfyui, python_of
from tests.denoised import denoise
from tests.nodes.test_nodes_animate import with_objects
from wan_core.checkpoint import load_dit
from wan_core.models.wan.families.fun.camera import camera_rays, read_camera
from wan_core.pipeline.comfy_conditioning import join
from wan_core.pipeline.sources import find_experts
from wan_core.sampling.conditioning import draw_noise

pytestmark = [pytest.mark.comfy, pytest.mark.slow]
SCRIPT = Path(__file__).parents[1] / "comfy_control_clip.py"


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> dict[str, Any]:
    checkout, out = find_comfyui(), tmp_path_factory.mktemp("clips") / "clips.pt"
    process = subprocess.run([python_of(checkout), SCRIPT, checkout, out], timeout=600, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-3000:]
    return torch.load(out)


@pytest.mark.parametrize("name", CASES)
def test_a_clip_equals_comfyuis(name: str, clips: dict[str, Any], tmp_path: Path) -> None:
    """VACE chained and with both experts, with masks, strengths and references; Fun control, inpaint and camera."""
    case, clip, plan = CASES[name], clips[name], plan_of(CASES[name])
    assert len(plan.phases) == (2 if case.task.endswith("A14B") else 1)
    models = {}
    for expert, weights in weights_of(case).items():
        path = tmp_path / f"wan_{expert}_noise.safetensors"
        save_file(weights, path)
        models[expert] = load_dit(path, dtype=torch.float32)
    paths = [tmp_path / f"wan_{expert}_noise.safetensors" for expert in models]
    experts = find_experts(*paths)
    assert experts.task.family == case.config.family
    texts = with_objects(clip["positive"], clip["negative"])
    joined = join(*texts, clip["latent"], experts, plan)
    noise = draw_noise(SEED, tuple(clip["latent"]["samples"].shape))
    with torch.no_grad():
        latents = denoise(joined.plan, models.__getitem__, joined.conditioning, noise)
    decoded = experts.vae.denormalise(latents)
    assert float((decoded - clip["made"]).norm() / clip["made"].norm()) < 1e-3


def test_a_camera_moves_as_comfyuis_does(clips: dict[str, Any]) -> None:
    for (theirs, size), rays in clips["rays"].items():
        assert torch.equal(camera_rays(read_camera(f"{MOTIONS[theirs]}:1.3", LENGTH), *size), rays), theirs

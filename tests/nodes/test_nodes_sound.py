"""Clips of S2V from the conditioning of ComfyUI's own nodes: our sampling and ComfyUI's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.animate_references import draw_weights
from tests.comfy_sound_clip import CONFIG, SEED, plan_of
from tests.comfyui import find_comfyui, python_of
from tests.denoised import denoise
from wan_core.checkpoint import load_dit
from wan_core.models.wan.families.s2v import COMFYUI_POSITIONS
from wan_core.pipeline.comfy_conditioning import join
from wan_core.pipeline.sources import find_experts
from wan_core.sampling.conditioning import draw_noise

pytestmark = [pytest.mark.comfy, pytest.mark.slow]
SCRIPT = Path(__file__).parents[1] / "comfy_sound_clip.py"


def test_two_clips_equal_comfyuis(tmp_path: Path) -> None:
    """With ComfyUI's positions of motion frames; with the reference's, the video is another."""
    checkout, out = find_comfyui(), tmp_path / "clips.pt"
    subprocess.run([python_of(checkout), SCRIPT, checkout, out], check=True, timeout=600, capture_output=True)
    path = tmp_path / "wan_model.safetensors"
    save_file(draw_weights(CONFIG), path)
    experts, model = find_experts(path), load_dit(path, dtype=torch.float32)
    for clip in torch.load(out):
        for asked, least, most in ((True, 0, 1e-3), (False, 1e-3, 1)):
            positive = [[rows, {**extras, COMFYUI_POSITIONS: asked}] for rows, extras in clip["positive"]]
            plan, conditioning, *_ = join(positive, clip["negative"], clip["latent"], experts, plan_of())
            assert {"audio", "reference", "motion", "pose"} <= conditioning.inputs.keys()
            noise = draw_noise(SEED, tuple(clip["latent"]["samples"].shape))
            with torch.no_grad():
                latents = denoise(plan, lambda _: model, conditioning, noise)
            decoded = experts.vae.denormalise(latents)
            assert least <= float((decoded - clip["made"]).norm() / clip["made"].norm()) < most

"""A clip of Animate and of Animate-2 from the conditioning of ComfyUI's own nodes: our sampling and ComfyUI's."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.animate_references import draw_weights
from tests.comfy_animate_clip import CONFIGS, METADATA, SEED, WINDOWED, plan_of
from tests.comfyui import find_comfyui, find_newer_comfyui, python_of
from tests.denoised import denoise
from wan_core.checkpoint import load_dit
from wan_core.pipeline.comfy_conditioning import join
from wan_core.pipeline.sources import find_experts
from wan_core.sampling.conditioning import draw_noise

pytestmark = [pytest.mark.comfy, pytest.mark.slow]
SCRIPT = Path(__file__).parents[1] / "comfy_animate_clip.py"


def with_objects(*conditionings: list[Any]) -> list[Any]:
    """With CLIP_VISION_OUTPUT in the place of its tensors, one object for each in all of them."""
    seen: dict[int, SimpleNamespace] = {}

    def whole(key: str, value: Any) -> Any:
        if key not in ("clip_vision_output", "clip_vision_output_pose"):
            return value
        return seen.setdefault(value.data_ptr(), SimpleNamespace(penultimate_hidden_states=value))

    return [[[rows, {k: whole(k, v) for k, v in e.items()}] for rows, e in one] for one in conditionings]


@pytest.mark.parametrize(
    ("family", "part", "driven"),
    [("animate", (), 2), ("animate2", (), 2), ("animate2", ("0", "0.6"), 4), ("animate2", ("0.2", "0.8"), 3)],
)
def test_a_clip_equals_comfyuis(family: str, part: tuple[str, ...], driven: int, tmp_path: Path) -> None:
    """But for what the reference does and ComfyUI does not: a block that the negative prompt's branch leaves out. part:
    of the run, in which the driving video is read."""
    checkout = find_newer_comfyui() if family == "animate2" else find_comfyui()
    out = tmp_path / "clip.pt"
    command = [python_of(checkout), SCRIPT, checkout, family, out, *part]
    subprocess.run(command, check=True, timeout=600, capture_output=True)
    clip = torch.load(out)
    path = tmp_path / "wan_model.safetensors"
    save_file(draw_weights(CONFIGS[family]), path, METADATA if family == "animate2" else None)
    experts = find_experts(path)
    assert experts.task.family == family
    texts = with_objects(clip["positive"], clip["negative"])
    plan, conditioning, *_ = join(*texts, clip["latent"], experts, plan_of(WINDOWED if part else 2))
    assert sum(not step.undriven for step in plan.steps) == driven
    noise = draw_noise(SEED, tuple(clip["latent"]["samples"].shape))
    model = load_dit(path, dtype=torch.float32)
    assert len(model.blocks) < 10  # none of them is the one that is left out
    with torch.no_grad():
        latents = denoise(plan, lambda _: model, conditioning, noise)
    decoded = experts.vae.denormalise(latents)
    assert float((decoded - clip["made"]).norm() / clip["made"].norm()) < 1e-3

"""From ComfyUI's CONDITIONING to the fields of `Conditioning`: what a family reads, asks for and refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wan_core.config import OptionError
from wan_core.models.wan.families import FAMILIES, check_keys, family_of, find_task

LATENTS = torch.zeros(1, 16, 3, 4, 6)
IMAGE = {"concat_latent_image": torch.ones_like(LATENTS), "concat_mask": torch.ones(1, 4, 3, 4, 6)}


def read(name: str, extras: dict[str, Any], latent: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    task = find_task(name)
    return family_of(task).read_conditioning(task, task.vae, extras, latent or {"samples": LATENTS})


def seen(width: int = 1280) -> SimpleNamespace:
    """A CLIP_VISION_OUTPUT."""
    return SimpleNamespace(penultimate_hidden_states=torch.full((1, 257, width), 0.5, dtype=torch.float16))


def test_wan21_reads_what_clip_sees() -> None:
    keys = read("i2v-14B-480P", {**IMAGE, "clip_vision_output": seen()})
    assert keys["concat"].shape == (1, 20, 3, 4, 6)
    assert keys["image_features"].shape == (1, 257, 1280) and keys["image_features"].dtype == torch.float32


def test_wan21_asks_for_what_clip_sees() -> None:
    with pytest.raises(OptionError, match=r"clip_vision_h\.safetensors .* clip_vision_output of WanCore"):
        read("i2v-14B-720P", IMAGE)
    with pytest.raises(OptionError, match="takes 1280 channels"):
        read("i2v-14B-720P", {**IMAGE, "clip_vision_output": seen(1664)})


def test_wan22_does_without_as_comfyui_does() -> None:
    assert set(read("i2v-A14B", {**IMAGE, "clip_vision_output": seen()})) == {"concat"}


def test_images_where_none_belongs_and_none_where_one_does() -> None:
    with pytest.raises(OptionError, match="t2v-14B takes no image"):
        read("t2v-14B", IMAGE)
    with pytest.raises(OptionError, match="connect WanCore Image to Video"):
        read("i2v-A14B", {})
    with pytest.raises(OptionError, match="connect WanCore Animate 2"):
        read("animate2-14B", {})
    mask = torch.ones(1, 1, 3, 4, 6)
    mask[:, :, 0] = 0
    with pytest.raises(OptionError, match="takes no known frame as latents"):
        read("t2v-A14B", {}, {"samples": LATENTS, "noise_mask": mask})
    wide = torch.zeros(1, 48, 3, 4, 6)
    assert set(read("ti2v-5B", {}, {"samples": wide, "noise_mask": mask})) == {"known"}


def test_what_a_model_would_not_see_is_refused() -> None:
    neutral = {"pooled_output": None, "attention_mask": torch.ones(1, 4), "control": None}
    check_keys(FAMILIES["wan"], "positive", {**neutral, **IMAGE, "clip_vision_output": seen()})
    with pytest.raises(OptionError, match="`negative` carries vace_frames, area, which this model does not take"):
        check_keys(FAMILIES["wan"], "negative", {"vace_frames": [LATENTS], "area": (1, 1, 0, 0)})

"""Image conditioning against diffusers' image-to-video pipeline, and sizes against the official rules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline

from wan_core.checkpoint import load_vae
from wan_core.models.wan.families.wan.inputs import image_channels
from wan_core.sampling.conditioning import best_size_for_image, size_for_image


@pytest.mark.parametrize("last", [False, True])
@torch.no_grad()
def test_mask_and_image_latents_are_those_of_diffusers(last):
    torch.manual_seed(0)
    theirs = AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1).eval()
    ours = load_vae(theirs.state_dict())
    first, final = torch.rand(2, 1, 3, 32, 48) * 2 - 1
    pipeline = SimpleNamespace(  # what its method reads of a pipeline
        vae_scale_factor_temporal=4,
        vae_scale_factor_spatial=8,
        vae=theirs,
        config=SimpleNamespace(expand_timesteps=False),
        _execution_device=torch.device("cpu"),
    )
    given_last = final if last else None
    size = (1, 16, 32, 48, 9, torch.float32, torch.device("cpu"), None, None)
    _, expected = WanImageToVideoPipeline.prepare_latents(pipeline, first, *size, given_last)
    channels = image_channels(ours, first[:, :, None], final[:, :, None] if last else None, 9)
    assert (channels - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("image", "area", "expected"),
    [
        ((1024, 768), 1280 * 720, (1104, 816)),
        ((832, 480), 1280 * 720, (1248, 720)),
        ((720, 1280), 832 * 480, (464, 832)),
    ],
)
def test_image_to_video_size_is_the_official_one(image, area, expected):
    assert size_for_image(*image, area, 16) == expected


@pytest.mark.parametrize(("image", "expected"), [((1920, 1080), (1248, 704)), ((512, 512), (960, 928))])
def test_size_of_the_5b_model_is_the_official_one(image, expected):
    assert best_size_for_image(*image, 1280 * 704, 32) == expected

"""The VAE's kernel on a GPU: near plain torch, nearer to float32 than it, and every chunk size alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.models.test_vae import TINY_21, TINY_22, make_latents, make_vae, make_video
from wan_core.execution.optimize import optimize_vae
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.vae import VideoVAE
from wan_core.ops.kernels import fused

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = torch.device("cuda", 0)
WIDE_21, WIDE_22 = (replace(config, encoder_dim=32, decoder_dim=32) for config in (TINY_21, TINY_22))
CONFIGS = pytest.mark.parametrize("config", [WIDE_21, WIDE_22], ids=["2.1", "2.2"])


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.float().cpu() - exact).norm() / exact.norm())


def on_gpu(config: VAEConfig) -> VideoVAE:
    return optimize_vae(make_vae(config).to(CUDA, torch.bfloat16), CUDA)


@torch.inference_mode()
@CONFIGS
@pytest.mark.parametrize("chunk", [1, 2, None])
def test_the_kernel_is_nearer_to_float32_than_torch(config: VAEConfig, chunk: int | None) -> None:
    vae, exact = on_gpu(config), make_vae(config)
    latents, video = make_latents(config, 5, 4, 6), make_video(config, 17, 4, 6)
    for run, given in (("decode", latents), ("encode", video)):
        expected = getattr(exact, run)(given)
        found = error(getattr(vae, run)(given, chunk=chunk), expected)
        with fused.use("torch"):
            plain = error(getattr(vae, run)(given, chunk=chunk), expected)
        assert found < 1.1 * plain and found < 0.1, (run, found, plain)


@torch.inference_mode()
def test_frames_that_stand_still_are_the_same_bits() -> None:
    """As on the CPU: whether a frame is computed or repeated does not show."""
    vae, video = on_gpu(WIDE_21), make_video(WIDE_21, 61, 4, 4).to(CUDA)
    video[:, :, 1:] = 0
    found = vae.encode(video)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wan_core.models.vae.vae._still_since", lambda video: list(range(video.shape[2])))
        assert torch.equal(found, vae.encode(video))

"""What ranks do in tests of a VAE that decodes in strips: see `parallel_ranks`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from parallel_checks import of_one, ranks_of, relative
from torch import Tensor

from tests.vae_passes import Passes
from wan_core.models.vae.config import VAE_21, VAE_22
from wan_core.models.vae.layers import AttentionBlock
from wan_core.models.vae.vae import VideoVAE
from wan_core.parallel.vae import Strips


@torch.no_grad()
def vae(
    mesh: str,
    config: str,
    rows: int,
    columns: int,
    frames: int = 3,
    chunk: int | None = 1,
    last: bool = False,
    batch: int = 2,
    passes: bool | None = None,
):
    """The largest differences between decoding in strips and whole, and between encoding with ranks and alone, relative
    to the largest number. passes: strips are decoded by those of a GPU, with earlier frames beside each other or not;
    None: by torch's layers."""
    model = small_vae(config)
    model = model.channels_last() if last else model
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(batch, model.config.z_dim, frames, rows, columns, generator=generator)

    def whole() -> tuple[Tensor, Tensor]:
        video = model.decode(latents, chunk=chunk, clamp=False)
        return video, torch.cat(model.encode_moments(video, chunk=chunk), 1)

    video, moments = of_one(mesh, whole)
    model.strips = Strips(ranks_of(mesh).world)
    with nullcontext() if passes is None else Passes(passes).in_place():
        split_video = model.decode(latents, chunk=chunk, clamp=False)
    split_moments = torch.cat(model.encode_moments(video, chunk=chunk), 1)
    assert split_video.shape == video.shape and split_moments.shape == moments.shape
    return relative(split_video, video), relative(split_moments, moments)


def small_vae(config: str) -> VideoVAE:
    """Random weights everywhere, also where a new model has zeros."""
    base = {"2.1": VAE_21, "2.2": VAE_22}[config]
    torch.manual_seed(0)
    model = VideoVAE(replace(base, encoder_dim=8, decoder_dim=8)).eval().requires_grad_(False)
    for block in model.modules():
        if isinstance(block, AttentionBlock):
            torch.nn.init.normal_(block.proj.weight, std=0.3)
    return model

"""What draws the live preview of the sampler: a map from latents to colours, or a tiny autoencoder where the user asks
ComfyUI for TAESD previews and has one for these latents in models/vae_approx."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch
from PIL import Image
from torch import Tensor

from wan_core.checkpoint import load_vae
from wan_core.config import OptionError, UserError
from wan_core.models.vae.tiny import TinyVAE
from wan_core.pipeline.settings import compute_dtype
from wan_core.pipeline.sources import recognise

from . import host
from .sockets import ModelSocket

TINY_FILES = {16: ("taew2_1", "lighttaew2_1"), 48: ("taew2_2", "lighttaew2_2")}  # by latent channels


class Previews(Protocol):
    def pictures(self, latents: Tensor) -> list[Image.Image]:
        """A picture of each latent frame of the first video of the transformer's latents [B, C, T, Y, X]."""
        ...


class TinyPreviews:
    """Previews of a tiny autoencoder."""

    def __init__(self, vae: TinyVAE) -> None:
        self.vae = vae

    @torch.no_grad()
    def pictures(self, latents: Tensor) -> list[Image.Image]:
        pictures = (still[0, :, 0].float().clamp(-1, 1) for still in self.vae.stills(latents[:1]))
        pixels = [((one + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0) for one in pictures]
        return [Image.fromarray(one.cpu().numpy()) for one in pixels]


def previews_of(model: ModelSocket) -> Previews | None:
    """What draws the previews of a run of `model`; None: nothing does."""
    channels = model.experts.vae.z_dim
    path = host.preview_file(TINY_FILES.get(channels, ()))
    if path is None or not model.experts.task.release.startswith("Wan"):  # the embedded model has latents of its own
        return model.rgb
    try:
        return TinyPreviews(tiny_vae(path, path.stat().st_mtime, channels))
    except (UserError, OSError) as fault:
        host.log.warning("WanCore: previews are those of latents: %s", fault)
        return model.rgb


@lru_cache(maxsize=1)
def tiny_vae(path: Path, changed: float, channels: int) -> TinyVAE:
    """The tiny autoencoder in a file that changed last at a time. Raises UserError."""
    part, device = recognise(path, "vae", load_vae), host.device()
    vae = part.load(device, compute_dtype("auto", device), None)
    if not isinstance(vae, TinyVAE) or vae.config.z_dim != channels:
        raise OptionError(f"{path} is no tiny autoencoder for latents of {channels} channels")
    host.log.info("WanCore draws previews with %s", path.name)
    return vae

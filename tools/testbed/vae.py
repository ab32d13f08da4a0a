"""The test bed's VAE: the embedded model's, trained on with textures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from tools.testbed.drawing import Drawing, Size
from tools.tiny.clips import ClipRing, fill, keep_growing
from tools.tiny.files import round_to_fp16, write_part
from tools.tiny.loop import Clock, Trainer
from tools.tiny.vae import Kernels, choose_kernels, latent_statistics, set_memory_format, vae_losses
from wan_core.checkpoint import load_vae
from wan_core.models.vae.vae import VideoVAE
from wan_core.pipeline.sources import TINY
from wan_lab.metrics import psnr

FRAMES = 17  # of the clips that it trains on
SMALL_SHARE = 0.25  # of those clips: pictures at half the size
BATCH, PEAK_LR, BANK, CHUNK = 4, 6e-4, 2048, 16
KEPT = 12.0  # seconds for what follows training
CHECKS = 8


def train_vae(out: Path, *, size: Size, device: torch.device, minutes: float, steps: int | None, seed: int) -> None:
    """Train `vae.safetensors` of `out`, or the embedded model's, and say how good it is. minutes: of the process."""
    path = out / "vae.safetensors"
    vae = load_vae(path if path.is_file() else TINY / "vae.safetensors", device=device, dtype=torch.float32)
    vae.train().requires_grad_(True)
    ring = ClipRing(Windows(size, device, seed), BANK if steps is None else 4)  # type: ignore[arg-type]
    chunk = min(CHUNK, ring.capacity)
    seconds = fill(ring, ring.capacity, chunk, 15)
    kernels = choose_kernels(vae, ring, BATCH, None) if device.type == "cuda" else Kernels(False, False)
    set_memory_format(vae, kernels.channels_last)
    trainer = Trainer({"vae": vae}, [vae_losses(vae, ring, BATCH, kernels)], peak_lr=PEAK_LR)
    done = trainer.run(Clock(minutes, steps, reserve=KEPT), keep_growing([(ring, chunk, seconds)], 0.05))
    take_average(trainer)
    round_to_fp16(vae)
    vae.eval().requires_grad_(False)
    mean, std = latent_statistics(vae, Windows(size, device, seed + 1), 256 if steps is None else 16)  # type: ignore[arg-type]
    vae.config = dataclasses.replace(vae.config, latents_mean=mean, latents_std=std)
    write_part(vae, out, "vae")
    print(f"{done} steps. {reconstruction(vae, size, CHECKS if steps is None else 1)}", flush=True)


def take_average(trainer: Trainer) -> None:
    """Give the trained modules the averaged weights."""
    with torch.no_grad():
        for parameter, average in zip(trainer.parameters, trainer.average, strict=True):
            parameter.copy_(average)


class Windows:
    """Clips as `Drawing` draws them, half the picture's size: parts of whole pictures, and pictures at half the size,
    which the transformers see too."""

    def __init__(self, size: Size, device: torch.device, seed: int) -> None:
        half = size.scaled(0.5)
        window = Size(min(FRAMES, size.frames), half.height, half.width)
        self.parts, self.small = Drawing(size, device, seed, window), Drawing(half, device, seed + 1, window)
        self.generator = self.parts.generator

    def draw(self, count: int) -> tuple[Tensor, None]:
        """Clips [count, 3, F, H, W] in -1..1."""
        small = round(SMALL_SHARE * count)
        return torch.cat([self.parts.draw(count - small)[0], self.small.draw(small)[0]]), None


@torch.no_grad()
def reconstruction(vae: VideoVAE, size: Size, count: int) -> str:
    """PSNR of whole clips that it has not seen."""
    drawing = Drawing(size, next(vae.parameters()).device, seed=10**6)
    ratios = []
    for _ in range(count):
        clip = drawing.draw(1)[0]
        pair = (x[0].permute(1, 2, 3, 0) / 2 + 0.5 for x in (clip, vae.decode(vae.encode(clip, chunk=4), chunk=4)))
        ratios.append(psnr(*pair))
    return f"reconstructions: {sum(ratios) / count:.2f} dB (worst {min(ratios):.2f})"

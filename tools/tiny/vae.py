"""Phase 1: the video VAE.

Shapes: B batch, z latent channels, F/H/W video frames, rows, columns, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny.clips import ClipRing, Drawing, Size, fill, held_out_scenes, keep_growing
from tools.tiny.files import report_sizes, round_to_fp16, write_part
from tools.tiny.loop import Clock, Trainer
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.vae import VideoVAE
from wan_lab.metrics import judge, psnr
from wan_lab.shapes import draw

CONFIG = VAEConfig(
    z_dim=16,
    encoder_dim=16,
    decoder_dim=16,
    dim_mult=(1, 2, 3, 3),
    num_res_blocks=1,
    latents_mean=(0.0,) * 16,
    latents_std=(1.0,) * 16,
)
EDGE_WEIGHT = 6.0  # pixels near an outline count this much more: they are few, and what a shape is known by
FIRST_FRAME_WEIGHT = 2.5  # its latent frame holds one frame, but it also starts every other frame's history
KL_WEIGHT = 1e-4
IMAGE_SHARE = 0.06  # of clips that are grey after the first frame, as image-to-video encodes them


def train_vae(
    out: Path,
    init: Path,
    *,
    size: Size,
    device: torch.device,
    minutes: float,
    steps: int | None,
    batch: int,
    lr: float,
    bank: int,
    seed: int,
    bf16: bool | None,
    checks: int,
) -> None:
    """Train, measure the latents' statistics, save `vae.safetensors`, and say how good it is on `checks` held-out
    clips.
    """
    vae = VideoVAE(CONFIG).to(device)
    initialise(vae)
    ring = ClipRing(Drawing(size, device, seed), bank)
    chunk = min(64, bank)
    seconds = fill(ring, bank, chunk, 30)
    kernels = choose_kernels(vae, ring, batch, bf16) if device.type == "cuda" else Kernels(False, bf16 is True)
    set_memory_format(vae, kernels.channels_last)
    losses = vae_losses(vae, ring, batch, kernels)
    trainer = Trainer({"vae": vae}, [losses], peak_lr=lr, init=init)
    steps = trainer.run(Clock(minutes, steps, reserve=30), keep_growing([(ring, chunk, seconds)], 0.02))
    trainer.finish(out)
    round_to_fp16(vae)
    mean, std = latent_statistics(vae, Drawing(size, device, seed + 1), max(chunk, 16 * checks))
    vae.config = dataclasses.replace(vae.config, latents_mean=mean, latents_std=std)
    write_part(vae, out, "vae")
    print(f"{steps} steps. " + reconstruction_report(vae, size, checks), flush=True)
    report_sizes(out)


def initialise(vae: VideoVAE) -> None:
    """Convolutions that pass on the variance they are given, residual blocks near the identity, latents with little
    noise.

    torch's own start loses 99.7 % of the signal between input and output, and a standard deviation of one in the
    latents drowns the rest: the decoder then takes thousands of steps to find out that it should listen to the
    encoder.
    """
    with torch.no_grad():
        for name, module in vae.named_modules():
            if isinstance(module, nn.Conv2d | nn.Conv3d):
                fan_in = module.weight[0].numel()
                residual = name.endswith(("residual.6", "proj"))
                module.weight.normal_(std=(0.2 if residual else 1.0) * fan_in**-0.5)
                if module.bias is not None:
                    module.bias.uniform_(-0.1, 0.1)  # grey is zero, and the norm of zero has no gradient
        assert vae.conv1.bias is not None
        vae.conv1.weight[vae.config.z_dim :].mul_(0.1)
        vae.conv1.bias[vae.config.z_dim :] = -6.0  # the log variance


# -------------------------------------------------------------------------------------------------------------- kernels


@dataclass(frozen=True)
class Kernels:
    """What the convolutions run as: their layout in memory, and bf16 or TF32."""

    channels_last: bool
    bf16: bool

    def __str__(self) -> str:
        return f"{'bf16' if self.bf16 else 'fp32'} {'channels last' if self.channels_last else 'channels first'}"


def choose_kernels(vae: VideoVAE, ring: ClipRing, batch: int, bf16: bool | None) -> Kernels:
    """The fastest way to take a training step on this device, by trial; without a wish, bf16 only if it saves a
    quarter.
    """
    seconds: dict[Kernels, float] = {}
    for wanted in (False, True) if bf16 is None else (bf16,):
        for channels_last in (False, True):
            kernels = Kernels(channels_last, wanted)
            set_memory_format(vae, channels_last)
            losses = vae_losses(vae, ring, batch, kernels)
            seconds[kernels] = min(time_step(vae, losses) for _ in range(6))
            print(f"{kernels}: {1e3 * seconds[kernels]:.1f} ms", flush=True)
    best = min(seconds, key=lambda kernels: seconds[kernels] * (1.0 if kernels.bf16 else 0.75))
    print(f"training in {best}", flush=True)
    return best


def time_step(vae: VideoVAE, losses: Callable[[], dict[str, Tensor]]) -> float:
    cuda = vae.conv1.weight.device.type == "cuda"
    start = time.monotonic()
    torch.stack(list(losses().values())).sum().backward()
    if cuda:
        torch.cuda.synchronize()
    vae.zero_grad(set_to_none=True)
    return time.monotonic() - start


def set_memory_format(vae: VideoVAE, channels_last: bool) -> None:
    """Lay out the convolutions' weights, and with them every activation."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for module in vae.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            weight = module.weight
            weight.data = weight.data.contiguous(
                memory_format=formats[weight.ndim] if channels_last else torch.contiguous_format
            )


# ----------------------------------------------------------------------------------------------------------------- loss


def vae_losses(vae: VideoVAE, ring: ClipRing, batch: int, kernels: Kernels) -> Callable[[], dict[str, Tensor]]:
    """Draws a batch from `ring`: weighted L1 + L2 of the reconstruction, and the latents' divergence from a unit
    normal.
    """

    def losses() -> dict[str, Tensor]:
        video = ring.sample(batch)["clip"].float() / 127.5 - 1
        image = torch.rand(batch, 1, 1, 1, 1, device=video.device) < IMAGE_SHARE
        later = torch.arange(video.shape[2], device=video.device)[:, None, None] > 0
        video = video.masked_fill(image & later, 0.0)
        if kernels.channels_last:
            video = video.contiguous(memory_format=torch.channels_last_3d)
        # Inside a CUDA graph autocast must not keep casts from one call to the next.
        with torch.autocast(video.device.type, torch.bfloat16, enabled=kernels.bf16, cache_enabled=False):
            mean, logvar = vae.encode_moments(video)
            logvar = logvar.float().clamp(-20, 10)
            latents = mean + torch.randn_like(logvar) * (0.5 * logvar).exp()
            decoded = vae.decode(latents, chunk=None, clamp=False)
        error = decoded.float() - video
        weight = pixel_weights(video)
        kl = 0.5 * (mean.float().square() + logvar.exp() - 1 - logvar).mean()
        return {
            "l1": (weight * error.abs()).mean(),
            "l2": 4 * (weight * error.square()).mean(),
            "kl": KL_WEIGHT * kl,
        }

    return losses


@torch.no_grad()
def pixel_weights(video: Tensor) -> Tensor:
    """How much each pixel counts, [B, 1, F, H, W] with mean 1: more within two pixels of an edge, more in the first
    frame.
    """
    frames = video.transpose(1, 2).flatten(0, 1)  # [B * F, 3, H, W]
    span = F.max_pool2d(frames, 5, 1, 2) + F.max_pool2d(-frames, 5, 1, 2)
    edge = (span.amax(1, keepdim=True) > 0.1).float().unflatten(0, video.shape[:1] + video.shape[2:3]).transpose(1, 2)
    weight = 1 + EDGE_WEIGHT * edge
    weight[:, :, 0] *= FIRST_FRAME_WEIGHT
    return weight / weight.mean()


@torch.no_grad()
def latent_statistics(vae: VideoVAE, drawing: Drawing, count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each latent channel over `count` clips."""
    total = torch.zeros(2, vae.config.z_dim, device=drawing.generator.device, dtype=torch.float64)
    clips = 0
    while clips < count:
        latents = vae.encode(drawing.draw(16)[0], chunk=None).double().transpose(0, 1).flatten(1)  # [z, ...]
        total += torch.stack([latents.mean(1), latents.square().mean(1)]) * 16
        clips += 16
    mean, square = total / clips
    std = (square - mean.square()).clamp(min=1e-8).sqrt()
    return tuple(round(v, 5) for v in mean.tolist()), tuple(round(v, 5) for v in std.tolist())


@torch.no_grad()
def reconstruction_report(vae: VideoVAE, size: Size, count: int) -> str:
    """PSNR of held-out clips, of all frames and of the first, and how many reconstructions still show their caption."""
    device = vae.conv1.weight.device
    scenes = held_out_scenes(count)
    right, whole, first = 0, [], []
    for start in range(0, count, 16):
        part = scenes[start : start + 16]
        clips = draw(part, seed=start, frames=size.frames, height=size.height, width=size.width).to(device)
        decoded = vae.decode(vae.encode(clips, chunk=None), chunk=None)
        for scene, a, b in zip(part, *(x.permute(0, 2, 3, 4, 1) / 2 + 0.5 for x in (clips, decoded)), strict=True):
            whole.append(psnr(a, b))
            first.append(psnr(a[:1], b[:1]))
            right += judge(b, scene).all_true
    return (
        f"held-out clips: {sum(whole) / count:.2f} dB (worst {min(whole):.2f}), "
        f"first frames {sum(first) / count:.2f} dB, recognised {right} of {count}"
    )

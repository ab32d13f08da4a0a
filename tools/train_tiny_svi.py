"""Train LoRAs of the embedded image-to-video model for clips as SVI 2.0 Pro has them, on a CPU, offline.

    python -m tools.train_tiny_svi --out runs/svi --minutes 15

The embedded model was never trained to go on from an anchor picture and a latent of the clip before. These LoRAs, one
for each expert, are: a shape that moves along its caption's axis and turns around at the border, seen through a window
of latents of a long video, with a picture of another time as the anchor. The latent of the clip before is disturbed in
half of the samples, as SVI recycles errors. `python -m wan_lab.clips` then measures what comes of ten clips.

Shapes: N long videos, B batch, z latent channels, T/Y/X latent frames, rows, columns, F video frames, A anchors.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from tools.tiny.clips import TRAINED, encode
from tools.tiny.distill import EXPERTS, Adapter
from tools.tiny.experts import BOUNDARY, OVERLAP, TRAINED_SHIFT, draw_sigmas
from wan_core.checkpoint import load_dit, load_text_encoder, load_vae
from wan_core.checkpoint.save import write_safetensors
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.sources import TINY
from wan_lab.shapes import MARGIN, Paths, coverage, sample_paths, scene_table

CLIP = 5  # latents of a clip of 17 frames
FIRST_SHARE = 0.25  # of samples that are a first clip: nothing comes before
DISTURBED_SHARE, DISTURBED = 0.5, 0.15  # of samples, and how far; the standard deviation of latents is 1


def bouncing(paths: Paths, frames: int, *, size: int, steps: int = 16) -> Tensor:
    """Where shapes are [B, F, 2] that go on as in their first `steps` frames, and turn around at the border."""
    low = (paths.radius + MARGIN)[:, None, None]
    high = size - low
    time = torch.arange(frames, dtype=torch.float32)[None, :, None] / steps
    place = (paths.start[:, None] + paths.travel[:, None] * time - low) / (high - low)
    return low + (high - low) * (1 - ((place % 2) - 1).abs())


def drawn(paths: Paths, centres: Tensor, size: int) -> Tensor:
    """Pictures of shapes at `centres` [B, F, 2]: float32 [B, 3, F, H, W] in -1..1."""
    batch, frames = centres.shape[:2]
    shape, radius = (one.repeat_interleave(frames) for one in (paths.shape, paths.radius))
    alpha = coverage(shape, centres.reshape(-1, 2), radius, height=size, width=size).view(batch, 1, frames, size, size)
    colour, background = (one.view(batch, 3, 1, 1, 1) for one in (paths.colour, paths.background))
    return torch.lerp(background, colour, alpha) * 2 - 1


@dataclass(frozen=True)
class Bank:
    """Normalised latents of long videos [N, z, T, Y, X], of pictures of them [N, A, z, 1, Y, X], and their scenes."""

    videos: Tensor
    anchors: Tensor
    scene: Tensor

    @classmethod
    @torch.no_grad()
    def draw(cls, vae: VideoVAE, count: int, frames: int, anchors: int, size: int, seed: int) -> Bank:
        generator = torch.Generator().manual_seed(seed)
        scene = torch.randint(len(TRAINED), (count,), generator=generator)
        paths = sample_paths(scene_table(TRAINED)[scene], height=size, width=size, generator=generator)
        centres = bouncing(paths, frames + 48, size=size)
        videos, pictures = list[Tensor](), list[Tensor]()
        for number in range(count):
            one = replace(
                paths, **{name: value[number : number + 1] for name, value in vars(paths).items() if value is not None}
            )
            own = centres[number : number + 1]
            videos.append(encode(vae, drawn(one, own[:, :frames], size)))
            chosen = torch.randint(frames + 48, (anchors,), generator=generator)
            singles = drawn(one, own[:, chosen], size)[0].transpose(0, 1)[:, :, None]  # [A, 3, 1, H, W]
            pictures.append(encode(vae, singles)[None])
        return cls(torch.cat(videos), torch.cat(pictures), scene)

    def sample(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Latents of clips [B, z, T, Y, X], what they are given beside noise [B, 4 + z, T, Y, X], and their scenes."""
        row = torch.randint(len(self.videos), (batch,))
        first = torch.rand(batch) < FIRST_SHARE
        start = torch.randint(2, self.videos.shape[2] - CLIP + 2, (batch,))
        anchor = self.anchors[row, torch.randint(self.anchors.shape[1], (batch,))]
        anchor[first] = self.videos[row[first], :, :1]
        begin = torch.where(first, 1, start)[:, None] + torch.arange(CLIP - 1)  # [B, T - 1]
        later = self.videos[row[:, None], :, begin].transpose(1, 2)  # [B, z, T - 1, Y, X]
        latents = torch.cat([anchor, later], 2)
        previous = later[:, :, :1] + disturbance(later[:, :, :1])
        known = torch.cat([anchor, previous, torch.zeros_like(later[:, :, 1:])], 2)
        known[first, :, 1:] = 0
        mask = torch.zeros_like(known[:, :4])
        mask[:, :, :1] = 1
        return latents, torch.cat([mask, known], 1), self.scene[row]


def disturbance(latents: Tensor) -> Tensor:
    """What some of the latents of clips before are off by: each channel as a whole, and each place."""
    batch, channels = latents.shape[:2]
    off = torch.randn(batch, channels, 1, 1, 1) + torch.randn_like(latents)
    return DISTURBED * off * (torch.rand(batch, 1, 1, 1, 1) < DISTURBED_SHARE)


def losses(experts: dict[str, WanModel], bank: Bank, text: Tensor, batch: int) -> dict[str, Tensor]:
    spans = {"high": (BOUNDARY["i2v"] - OVERLAP, 1.0), "low": (0.0, BOUNDARY["i2v"] + OVERLAP)}
    found: dict[str, Tensor] = {}
    for name, expert in experts.items():
        latents, given, scene = bank.sample(batch)
        sigma = draw_sigmas(batch, *spans[name], TRAINED_SHIFT[name], latents.device)
        noise = torch.randn_like(latents)
        x = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
        silent = torch.rand(batch) < 0.1
        rows = torch.where(silent[:, None, None], text[-1], text[scene])
        found[name] = (expert(torch.cat([x, given], 1), 1000 * sigma, rows) - (noise - latents)).square().mean()
    return found


def train(options: argparse.Namespace) -> None:
    """Train both LoRAs for so many minutes of this process's own time, so that a busy machine trains as much."""
    torch.manual_seed(options.seed)
    vae = load_vae(TINY / "vae.safetensors", dtype=torch.float32)
    encoder = load_text_encoder(TINY / "text_encoder.safetensors", dtype=torch.float32)
    text = encoder.encode([*(scene.caption for scene in TRAINED), ""])
    experts = {name: load_dit(TINY / f"i2v_{name}.safetensors", dtype=torch.float32) for name in EXPERTS}
    adapters = {name: Adapter(expert, options.rank) for name, expert in experts.items()}
    bank = Bank.draw(vae, options.videos, options.frames, options.anchors, options.size, options.seed)
    start, step, told = time.process_time(), 0, 0.0
    print(f"{options.videos} long videos in {start:.0f} s", flush=True)
    parameters = [one for adapter in adapters.values() for one in adapter.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, betas=(0.9, 0.99))
    average = [one.detach().clone() for one in parameters]
    while (now := time.process_time()) < 60 * options.minutes and step != options.steps:
        progress = (now - start) / (60 * options.minutes - start)
        optimizer.param_groups[0]["lr"] = options.lr * min(1, (step + 1) / 30) * (1 - progress)
        optimizer.zero_grad()
        error = losses(experts, bank, text, options.batch)
        sum(error.values(), torch.zeros(())).backward()
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step += 1
        decay = min(0.99, step / (9 + step))
        for kept, parameter in zip(average, parameters, strict=True):
            kept.lerp_(parameter.detach(), 1 - decay)
        if now - told > 15:
            told = now
            words = "  ".join(f"{name} {float(one):.4f}" for name, one in error.items())
            print(f"[{now:4.0f} s] step {step}  {words}", flush=True)
            write(adapters, average, options.out, step)
    write(adapters, average, options.out, step)


@torch.no_grad()
def write(adapters: dict[str, Adapter], average: list[Tensor], out: Path, step: int) -> None:
    """The averaged LoRAs of both experts. What is trained stays as it is."""
    parameters = [one for adapter in adapters.values() for one in adapter.parameters()]
    trained = [one.clone() for one in parameters]
    for parameter, value in zip(parameters, average, strict=True):
        parameter.copy_(value)
    out.mkdir(parents=True, exist_ok=True)
    for name, adapter in adapters.items():
        spent = {"steps": str(step), "cpu_seconds": f"{time.process_time():.0f}"}
        metadata = {"format": "pt", "base_model": "i2v-tiny", "expert": name, "svi": "2.0 pro, embedded model", **spent}
        write_safetensors(adapter.tensors(), out / f"i2v_svi_2.0_pro_lora_{name}_noise.safetensors", metadata)
    for parameter, value in zip(parameters, trained, strict=True):
        parameter.copy_(value)


def main(arguments: list[str] | None = None) -> None:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--out", type=Path, required=True, help="folder for the LoRAs")
    top.add_argument("--minutes", type=float, default=15.0, help="processor time of the whole command (default 15)")
    top.add_argument("--steps", type=int, help="stop training after so many, if the time is not over")
    top.add_argument("--batch", type=int, default=16)
    top.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    top.add_argument("--rank", type=int, default=8)
    top.add_argument("--videos", type=int, default=96, help="long videos that are drawn")
    top.add_argument("--frames", type=int, default=61, help="of a long video, 4n + 1 (default 61)")
    top.add_argument("--anchors", type=int, default=3, help="pictures of each that may be the anchor")
    top.add_argument("--size", type=int, default=96, help="pixels a side (default 96)")
    top.add_argument("--seed", type=int, default=0)
    train(top.parse_args(arguments))


if __name__ == "__main__":
    main()

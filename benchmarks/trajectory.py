"""Suite `trajectory`: what a setup does to finished latents, not to one forward.

Two kinds of rows, each against `plain torch` from the same noise:

- `random`: weights of full size, a short denoise over both experts. The weights mean nothing, so neither do the videos;
  but the shapes, the kernels and the growth of an error over steps are those of the real model.
- `captions`: the embedded model, a caption and a seed for each sample, 20 guided steps. Here an error shows as what it
  does to a picture, and the judge (`wan_core.media.metrics`) says how many captions still come true. Its row
  `float32` is the
  scale: as far as that is from bf16, bf16 itself is from the truth.

error, latent_psnr   of the latents: relative difference, and decibels with their range as the peak; of the captions,
                     means over samples
psnr, ssim           of the decoded frames
captions_true        share of samples whose background, colour, shape and motion are all as the caption says

Legend: B samples, C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from benchmarks.cases import parse_size
from benchmarks.measure import make_room, relative_error
from benchmarks.rows import Row, guarded
from benchmarks.setups import REFERENCE, SETUPS, Setup, find_setup
from wan_core.checkpoint import load_dit, load_text_encoder, load_vae
from wan_core.checkpoint.random import random_module
from wan_core.config import OptionError, check_size
from wan_core.media.metrics import judge, psnr, ssim
from wan_core.media.shapes import SCENES, Scene, held_out
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.tasks import find_task
from wan_core.pipeline.sources import RANDOM, TINY
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.denoise import denoise
from wan_core.sampling.plan import Expert, Plan, make_plan

HELD_OUT = tuple(scene for scene in SCENES if held_out(scene))
BATCH = 16  # captions at once
CAP = 100.0  # decibels that stand for equality
FLOAT32 = Setup("float32", kernels="torch")
Acquire = Callable[[Expert], WanModel]


def trajectory_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Random weights and captions on a GPU, captions alone on a CPU; --model asks for one. Raises OptionError."""
    setups = [find_setup(entry) for entry in options.setup] if options.setup else list(SETUPS.values())
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
    details |= {"dtype": options.precision, "solver": "unipc"}
    if name.startswith("random:"):
        task = name.removeprefix("random:")
        if task not in RANDOM or not find_task(task).two_experts or find_task(task).image != "none":
            raise OptionError(
                f"model {name!r} given; the suite trajectory takes random:t2v-A14B or tiny, both if left out"
            )
        config, vae = RANDOM[task]
        config = replace(config, num_layers=options.layers or config.num_layers)
        details["layers"] = config.num_layers
        plan = make_plan(task=task, steps=options.steps or 8)
        for size in sizes:
            trial = RandomTrial(config, vae, plan, size, device, dtype)
            yield from compare(trial, setups, device)
    if options.model in (None, "tiny"):
        tiny = find_task("t2v-tiny")
        size = sizes[0] if options.model and options.size else f"{tiny.width}x{tiny.height}x{tiny.frames}"
        samples = options.samples or (64 if device.type == "cuda" else 8)
        captions = CaptionTrial(make_plan(task="t2v-tiny", steps=options.steps), size, samples, device, dtype)
        yield from compare(captions, setups, device)
        if dtype != torch.float32:
            yield {"name": "float32", "size": size, **captions.run(FLOAT32, torch.float32)}


def compare(trial: RandomTrial | CaptionTrial, setups: Sequence[Setup], device: torch.device) -> Iterator[Row]:
    """A row for each setup; the trial keeps what REFERENCE gave, whose own row is the first that is made."""
    yield {"name": REFERENCE.name, "size": trial.size, **trial.run(REFERENCE)}
    for setup in setups:
        if setup != REFERENCE:
            make_room(device)
            reason = setup.why_not(device, trial.dtype, trial.head_dim)
            yield guarded(setup.name, trial.size, reason, lambda s=setup: trial.run(s))


@torch.no_grad()
def finish(
    setup: Setup, plan: Plan, acquire: Acquire, conditioning: Conditioning, noise: Tensor, *, batched: bool
) -> Tensor:
    """Normalised latents float32, as `noise` [B, C, T, Y, X], of a denoise in `setup`, which `acquire` applied."""
    with setup.running():
        return denoise(plan, acquire, conditioning, noise, batched=batched)


def latent_shape(size: str, vae: VAEConfig) -> tuple[int, int, int, int, int]:
    """[1, C, T, Y, X] of a video of WIDTHxHEIGHTxFRAMES. Raises OptionError."""
    width, height, frames = parse_size(size)
    stride = vae.spatial_stride
    check_size(width, height, frames, multiple=2 * stride, temporal=vae.temporal_stride)
    return 1, vae.z_dim, (frames - 1) // vae.temporal_stride + 1, height // stride, width // stride


def decibels(output: Tensor, reference: Tensor) -> float:
    """Peak signal-to-noise ratio of latents, the peak being the range of `reference`; `CAP` at most."""
    error = float((output - reference).square().mean())
    peak = float(reference.max() - reference.min())
    return CAP if error == 0 else min(CAP, 10 * math.log10(peak**2 / error))


@dataclass
class RandomTrial:
    """One short denoise of random weights. An expert is drawn when its phase begins: one is on the device at a time."""

    config: DiTConfig
    vae: VAEConfig
    plan: Plan
    size: str
    device: torch.device
    dtype: torch.dtype
    reference: Tensor | None = None

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    def run(self, setup: Setup) -> Row:
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randn(1, n, self.config.text_dim, generator=generator).to(self.device) for n in (24, 12)]
        noise = draw_noise(0, latent_shape(self.size, self.vae)).to(self.device)

        def acquire(expert: Expert) -> WanModel:
            make_room(self.device)
            seed = ("high", "low").index(expert)
            held = setup.quantization(self.device)
            model = random_module(self.config, device=self.device, dtype=self.dtype, seed=seed, quantization=held)
            return setup.apply(cast(WanModel, model))

        latents = finish(setup, self.plan, acquire, Conditioning(cond=rows[0], uncond=rows[1]), noise, batched=False)
        row: Row = {"weights": "random", "samples": 1, "steps": len(self.plan.steps)}
        if setup == REFERENCE:
            self.reference = latents
            return row
        assert self.reference is not None
        psnr_of_latents = decibels(latents, self.reference)
        return row | {"error": relative_error(latents, self.reference), "latent_psnr": round(psnr_of_latents, 2)}


class CaptionTrial:
    """The embedded model: held-out captions, each with a seed of its own, drawn as `generate` would draw them."""

    def __init__(self, plan: Plan, size: str, samples: int, device: torch.device, dtype: torch.dtype) -> None:
        self.plan, self.size, self.device, self.dtype = plan, size, device, dtype
        self.vae = load_vae(TINY / "vae.safetensors", device=device, dtype=torch.float32)
        self.shape = latent_shape(size, self.vae.config)
        self.scenes: list[Scene] = [HELD_OUT[37 * i % len(HELD_OUT)] for i in range(samples)]  # neighbours differ
        encoder = load_text_encoder(TINY / "text_encoder.safetensors", device=device, dtype=dtype)
        self.rows = encoder.encode([*(scene.caption for scene in self.scenes), ""])
        self.reference: tuple[Tensor, Tensor] | None = None
        self.head_dim = self.expert("high").config.head_dim

    def expert(self, name: Expert, setup: Setup = REFERENCE, dtype: torch.dtype | None = None) -> WanModel:
        path, held = TINY / f"t2v_{name}.safetensors", setup.quantization(self.device)
        return setup.apply(load_dit(path, device=self.device, dtype=dtype or self.dtype, quantization=held))

    def run(self, setup: Setup, dtype: torch.dtype | None = None) -> Row:
        experts: dict[Expert, WanModel] = {n: self.expert(n, setup, dtype) for n in self.plan.experts}
        latents = torch.cat([self._finish(setup, experts, start) for start in range(0, len(self.scenes), BATCH)])
        frames = self._decode(latents)
        row: Row = {"weights": "embedded", "samples": len(self.scenes), "steps": len(self.plan.steps)}
        row["captions_true"] = self.true_share(frames)
        if setup == REFERENCE:
            self.reference = (latents, frames)
            return row
        assert self.reference is not None
        return row | self._distances(latents, frames, *self.reference)

    def _finish(self, setup: Setup, experts: dict[Expert, WanModel], start: int) -> Tensor:
        scenes = self.scenes[start : start + BATCH]
        noise = torch.cat([draw_noise(start + i, self.shape) for i in range(len(scenes))]).to(self.device)
        conditioning = Conditioning(cond=self.rows[start : start + len(scenes)], uncond=self.rows[-1:])
        return finish(setup, self.plan, experts.__getitem__, conditioning, noise, batched=True)

    def true_share(self, frames: Tensor) -> float:
        """The share of the captions that their videos show."""
        true = sum(judge(video, scene).all_true for video, scene in zip(frames, self.scenes, strict=True))
        return round(true / len(self.scenes), 4)

    @torch.no_grad()
    def _decode(self, latents: Tensor) -> Tensor:
        """Frames [B, F, H, W, 3] in 0..1."""
        videos = [self.vae.decode(self.vae.denormalise(part), chunk=None) for part in latents.split(BATCH)]
        return torch.cat(videos).permute(0, 2, 3, 4, 1) / 2 + 0.5

    def _distances(self, latents: Tensor, frames: Tensor, exact: Tensor, exact_frames: Tensor) -> Row:
        """Means over samples."""
        each = [
            (relative_error(a, b), decibels(a, b), min(CAP, psnr(x, y)), ssim(x, y))
            for a, b, x, y in zip(latents, exact, frames, exact_frames, strict=True)
        ]
        error, latent_psnr, psnr_of_frames, similarity = (sum(column) / len(each) for column in zip(*each, strict=True))
        return {
            "error": float(f"{error:.3g}"),
            "latent_psnr": round(latent_psnr, 2),
            "psnr": round(psnr_of_frames, 2),
            "ssim": round(similarity, 4),
        }

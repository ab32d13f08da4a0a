"""The test bed's transformers, by flow matching: both experts and the text encoder at once.

One pair of weights makes text- and image-to-video: its last 20 input channels, mask and image, are zero for clips
without an image. A text-to-video file is the same weights without these channels, and gives the same velocities.

Shapes: B batch, z latent channels, T/Y/X latent frames, rows, columns, L text rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.testbed.drawing import Drawing, Size
from tools.testbed.latents import WorldRing
from tools.testbed.vae import take_average
from tools.testbed.words import SILENT, TEXT_LEN, silent_prompts, token_rows, train_tokenizer
from tools.tiny.clips import Ring
from tools.tiny.experts import draw_sigmas, encode_text, initialise, initialise_text, run_in_bf16
from tools.tiny.files import write_part
from tools.tiny.loop import Clock, Trainer
from wan_core.checkpoint import load_dit, load_text_encoder, load_vae
from wan_core.models.text.tokenizer import Tokenizer
from wan_core.models.text.umt5 import TextConfig, TextEncoder, UMT5Encoder
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.layers import PLAIN_PARTS, BlockParts
from wan_core.models.wan.model import WanModel
from wan_core.ops.custom_ops import allow_variants

TEXT_DIM = 64
# Heads of 128 as in the real model. At the whole size, 4,224 tokens, attention is two thirds of the arithmetic.
CONFIG = DiTConfig(
    in_channels=36,
    out_channels=16,
    dim=256,
    ffn_dim=1024,
    num_heads=2,
    num_layers=5,
    text_dim=TEXT_DIM,
    text_len=TEXT_LEN,
)
SPANS = {"high": (0.85, 1.0), "low": (0.0, 0.925)}  # sigmas: both experts see those around the switch
TRAINED_SHIFT = {"high": 5.0, "low": 3.0}  # how timesteps are spread: towards noise
CAPTION_DROPOUT = 0.12
PEAK_LR = 1.2e-3
KEPT = 8.0  # seconds for what follows training
GROWTH_SHARE = 0.15  # of the time: drawing and encoding new clips
PARTS = {"high": "high_noise_model", "low": "low_noise_model"}


@dataclass(frozen=True)
class Stage:
    """Up to `until` of the training time, steps of `turns` in turn: a share of the picture's size each."""

    until: float
    turns: tuple[float, ...]


STAGES = (Stage(0.4, (0.5,)), Stage(1.0, (1.0, 1.0, 1.0, 0.5)))
BATCH = {0.5: 32, 1.0: 8}  # about 34,000 tokens each
BANK, CHUNK = {0.5: 16384, 1.0: 4096}, {0.5: 32, 1.0: 8}


@dataclass(frozen=True, kw_only=True)
class Training:
    out: Path
    size: Size
    device: torch.device
    minutes: float
    steps: int | None
    seed: int
    compile: bool
    config: DiTConfig = CONFIG


def train_experts(run: Training) -> None:
    """Train the experts and the text encoder of `run.out`, new ones where there are none, on its VAE."""
    vae = load_vae(run.out / "vae.safetensors", device=run.device, dtype=torch.float32)
    text, tokenizer = find_text(run)
    goes_on = (run.out / f"{PARTS['high']}.safetensors").is_file()
    experts = {name: find_expert(run, name) for name in PARTS}
    rings = {share: make_ring(run, share, vae, tokenizer) for share in BATCH}
    silent = tuple(t.to(run.device) for t in token_rows(tokenizer, silent_prompts()))
    losses = {share: flow_losses(experts, text, rings[share], silent, batch_of(run, share)) for share in BATCH}
    for ring in rings.values():
        ring.prepare()
    clock = Clock(run.minutes, run.steps, reserve=KEPT)
    trainer = Trainer({"text": text, **experts}, [*losses.values()], peak_lr=PEAK_LR, weight_decay=0.01)

    def write() -> None:
        write_part(TextEncoder(text, tokenizer), run.out, "text_encoder")
        for name, expert in experts.items():
            write_part(expert, run.out, PARTS[name])

    with fastest_attention(run.device):
        stages = STAGES[-1:] if goes_on else STAGES
        steps = trainer.run(clock, walk_stages(stages, trainer, clock, rings, losses, write))
    take_average(trainer)
    write()
    drawn = ", ".join(f"{ring.added} at {share:g}" for share, ring in rings.items())
    print(f"{steps} steps, clips drawn: {drawn} of the size", flush=True)


def make_ring(run: Training, share: float, vae: VideoVAE, tokenizer: Tokenizer) -> WorldRing:
    drawing = Drawing(run.size.scaled(share), run.device, run.seed + round(100 * share))
    bank, chunk = (BANK[share], CHUNK[share]) if run.steps is None else (8, 4)
    return WorldRing(drawing, vae, tokenizer, bank, chunk)


def batch_of(run: Training, share: float) -> int:
    return BATCH[share] if run.steps is None else 2


def walk_stages(
    stages: Sequence[Stage],
    trainer: Trainer,
    clock: Clock,
    rings: dict[float, WorldRing],
    losses: dict[float, Callable[[], dict[str, Tensor]]],
    write: Callable[[], None],
) -> Callable[[int], None]:
    """A `between` for Trainer.run: the losses of the stage that the clock has reached, and new clips for every size.

    The first steps are one of each size, so that what fails does so before time is spent. Each stage ends with a copy
    of the averaged weights on disk.
    """
    begin, stage = time.monotonic(), None
    spent = dict.fromkeys(rings, 0.0)

    def between(step: int) -> None:
        nonlocal stage
        now = next((s for s in stages if clock.progress(step) < s.until), stages[-1])
        if now is not stage and step >= len(losses):
            if stage is not None:
                with averaged(trainer):
                    write()
            stage = now
            print("sizes: " + ", ".join(f"{share:g}" for share in stage.turns), flush=True)
            trainer.losses = [losses[share] for share in stage.turns]
        share = min(spent, key=lambda share: spent[share])
        if sum(spent.values()) + rings[share].seconds < GROWTH_SHARE * (time.monotonic() - begin):
            rings[share].grow(rings[share].chunk)
            spent[share] += rings[share].seconds

    return between


@contextmanager
def averaged(trainer: Trainer) -> Iterator[None]:
    """Inside, the modules have the averaged weights."""
    kept = [parameter.detach().clone() for parameter in trainer.parameters]
    take_average(trainer)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(trainer.parameters, kept, strict=True):
                parameter.copy_(value)


# ----------------------------------------------------------------------------------------------------------- modules


def find_text(run: Training) -> tuple[UMT5Encoder, Tokenizer]:
    path = run.out / "text_encoder.safetensors"
    if path.is_file():
        found = load_text_encoder(path, device=run.device, dtype=torch.float32)
        found.encoder.train().requires_grad_(True)
        return found.encoder, Tokenizer(found.tokenizer.proto, TEXT_LEN)
    tokenizer = Tokenizer(train_tokenizer(), TEXT_LEN)
    config = TextConfig(
        vocab_size=len(tokenizer), dim=TEXT_DIM, dim_attn=TEXT_DIM, dim_ffn=160, num_heads=2, num_layers=2
    )
    return UMT5Encoder(config).apply(initialise_text).to(run.device), tokenizer


def find_expert(run: Training, name: str) -> WanModel:
    """An expert whose blocks run in bf16 around a float32 residual; embeddings and head stay float32."""
    path = run.out / f"{PARTS[name]}.safetensors"
    if path.is_file():
        print(f"going on from {path}", flush=True)
        expert = load_dit(path, device=run.device, dtype=torch.float32).train().requires_grad_(True)
    else:
        expert = WanModel(run.config).to(run.device)
        initialise(expert)
    if run.compile:
        allow_variants(8 * len(BATCH))
        before, after = (torch.compile(part, dynamic=False) for part in PLAIN_PARTS)
        for block in expert.blocks:  # all share what is compiled for the first
            block.parts = BlockParts(before, after)
    run_in_bf16(expert, run.device, run.device.type == "cuda")
    expert.rope = cache(expert.rope)  # a graph reads the table of its size for ever; the model keeps only the last one
    return expert


@contextmanager
def fastest_attention(device: torch.device) -> Iterator[None]:
    """Inside, torch attends by whichever of its kernels is faster forwards and backwards at the whole size."""
    if device.type != "cuda":
        yield
        return
    shape = (8, 4224, CONFIG.num_heads, CONFIG.head_dim)
    tensors = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    q, k, v = (t.transpose(1, 2) for t in tensors)
    seconds = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            for _ in range(4):
                torch.cuda.synchronize()
                start = time.monotonic()
                F.scaled_dot_product_attention(q, k, v).transpose(1, 2).square().sum().backward()
                torch.cuda.synchronize()
                seconds[backend] = time.monotonic() - start
    best = min(seconds, key=lambda backend: seconds[backend])
    print(", ".join(f"{backend.name} {1e3 * s:.2f} ms" for backend, s in seconds.items()), flush=True)
    others = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel([best, *others], set_priority=True):
        yield


def flow_losses(
    experts: dict[str, WanModel], text: UMT5Encoder, ring: Ring, silent: tuple[Tensor, ...], batch: int
) -> Callable[[], dict[str, Tensor]]:
    """Draws a batch; each expert gets its own noise and timesteps. Mean squared error of the velocity."""

    def losses() -> dict[str, Tensor]:
        rows = ring.sample(batch)
        device = rows["ids"].device
        dropped = (torch.rand(batch, device=device) < CAPTION_DROPOUT)[:, None]
        other = torch.randint(SILENT, (batch,), device=device)
        ids, mask = (torch.where(dropped, t[other], rows[n]) for n, t in zip(("ids", "mask"), silent, strict=True))
        context = encode_text(text, ids, mask)
        given = {name: rows[name].float() for name in ("latent", "image")}
        return {
            name: velocity_loss(expert, given, context, draw_sigmas(batch, *SPANS[name], TRAINED_SHIFT[name], device))
            for name, expert in experts.items()
        }

    return losses


def velocity_loss(expert: WanModel, rows: dict[str, Tensor], text: Tensor, sigma: Tensor) -> Tensor:
    latents = rows["latent"]
    noise = torch.randn_like(latents)
    x = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
    return F.mse_loss(expert(torch.cat([x, rows["image"]], 1), 1000 * sigma, text), noise - latents)

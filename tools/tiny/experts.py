"""Phases 2 and 3: the transformers, by flow matching, both experts at once.

x = (1 - sigma) * latents + sigma * noise, velocity = noise - latents, timestep = 1000 * sigma.
Shapes: B batch, z latent channels, T/Y/X latent frames, rows, columns, L text rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny.clips import TRAINED, Drawing, LatentRing, Size, fill, keep_growing
from tools.tiny.files import part_path, report_sizes, round_to_fp16, write_part
from tools.tiny.loop import Clock, Trainer
from tools.tiny.words import DROPPED_ROWS, TEXT_LEN, token_table, train_tokenizer
from wan_core.checkpoint import load_text_encoder, load_vae
from wan_core.models.text.config import TextConfig
from wan_core.models.text.tokenizer import Tokenizer
from wan_core.models.text.umt5 import Attention, FeedForward, RelativePosition, TextEncoder, UMT5Encoder
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.layers import PLAIN_PARTS, BlockParts
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs, Place, Run
from wan_core.models.wan.tasks import find_task
from wan_core.ops.kernels import fused

TEXT_DIM = 64
T2V = DiTConfig(
    in_channels=16,
    out_channels=16,
    dim=128,
    ffn_dim=384,
    num_heads=2,
    num_layers=6,
    text_dim=TEXT_DIM,
    text_len=TEXT_LEN,
)
# Narrow, so that all parts together stay below 12 MB; its conditioning already holds the answer to everything but the
# motion.
I2V = DiTConfig(
    in_channels=36,
    out_channels=16,
    dim=96,
    ffn_dim=192,
    num_heads=3,
    num_layers=4,
    freq_dim=64,
    text_dim=TEXT_DIM,
    text_len=TEXT_LEN,
)
BOUNDARY = {"t2v": 0.875, "i2v": 0.9}
OVERLAP = 0.01  # sigmas beyond the boundary that an expert sees too, so that a run may move the boundary a little
# How timesteps are spread: towards noise, about as a run with shift 5 visits them.
TRAINED_SHIFT = {"high": 5.0, "low": 3.0}
CAPTION_DROPOUT, FULL_STOP_SHARE = 0.12, 0.1

Context = Callable[[Tensor], Tensor]  # rows of a token table [B] -> text rows [B, L, TEXT_DIM]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the command line decides for both phases."""

    out: Path
    init: Path
    size: Size
    device: torch.device
    minutes: float
    steps: int | None
    batch: int
    lr: float
    bank: int
    seed: int
    bf16: bool
    compile: bool


@torch.no_grad()
def initialise_text(module: nn.Module) -> None:
    """T5's initialisation; the query weights include the factor 1 / sqrt(D) that its attention omits."""
    if isinstance(module, UMT5Encoder):
        nn.init.normal_(module.token_embedding.weight)
    elif isinstance(module, Attention):
        inner, dim = module.q.weight.shape
        nn.init.normal_(module.q.weight, std=(dim * inner / module.heads) ** -0.5)
        nn.init.normal_(module.k.weight, std=dim**-0.5)
        nn.init.normal_(module.v.weight, std=dim**-0.5)
        nn.init.normal_(module.o.weight, std=inner**-0.5)
    elif isinstance(module, FeedForward):
        dim, inner = module.fc2.weight.shape
        for linear in (module.gate[0], module.fc1):
            assert isinstance(linear, nn.Linear)
            nn.init.normal_(linear.weight, std=dim**-0.5)
        nn.init.normal_(module.fc2.weight, std=inner**-0.5)
    elif isinstance(module, RelativePosition):
        nn.init.normal_(module.embedding.weight, std=(2 * module.embedding.weight.numel()) ** -0.5)


def train_t2v(run: Training) -> None:
    """Text encoder and both text-to-video experts together -> text_encoder, t2v_high and t2v_low."""
    tokenizer = Tokenizer(train_tokenizer(), TEXT_LEN)
    config = TextConfig(
        vocab_size=len(tokenizer), dim=TEXT_DIM, dim_attn=TEXT_DIM, dim_ffn=160, num_heads=2, num_layers=2
    )
    text = UMT5Encoder(config).apply(initialise_text).to(run.device)
    ids, mask = (t.to(run.device) for t in token_table(tokenizer, [scene.caption for scene in TRAINED]))

    def context(row: Tensor) -> Tensor:
        return encode_text(text, ids[row], mask[row])

    modules = train_experts(run, "t2v", T2V, context, {"text": text})
    round_to_fp16(text)
    write_part(TextEncoder(text, tokenizer), run.out, "text_encoder")
    write_experts(run.out, "t2v", modules)


def train_i2v(run: Training) -> None:
    """Both image-to-video experts, on the finished text encoder -> i2v_high and i2v_low."""
    text = load_text_encoder(part_path(run.init, "text_encoder"), device=run.device, dtype=torch.float32)
    tokenizer = Tokenizer(text.tokenizer.proto, TEXT_LEN)
    ids, mask = (t.to(run.device) for t in token_table(tokenizer, [scene.caption for scene in TRAINED]))
    with torch.no_grad():
        rows = encode_text(text.encoder, ids, mask)
    write_experts(run.out, "i2v", train_experts(run, "i2v", I2V, lambda row: rows[row], {}))


def encode_text(text: UMT5Encoder, ids: Tensor, mask: Tensor) -> Tensor:
    """Text rows as the pipeline makes them: zero where there is no token."""
    return text(ids, mask).masked_fill(~mask[..., None], 0)


def write_experts(out: Path, task: str, experts: dict[str, WanModel]) -> None:
    for name, expert in experts.items():
        round_to_fp16(expert)
        write_part(expert, out, f"{task}_{name}")
    report_sizes(out)


def train_experts(
    run: Training, task: str, config: DiTConfig, context: Context, others: dict[str, nn.Module]
) -> dict[str, WanModel]:
    """{"high", "low"} after training with `others`, all with averaged weights; the resume files are written."""
    vae = load_vae(part_path(run.init, "vae"), device=run.device, dtype=torch.float32)
    experts = {name: build_expert(config, run) for name in ("high", "low")}
    image = find_task(f"{task}-tiny").image == "channels"
    ring = LatentRing(Drawing(run.size, run.device, run.seed), vae, run.bank, image=image)
    chunk = min(64, run.bank)
    seconds = fill(ring, min(run.bank, 8192), chunk, 30)
    named: dict[str, nn.Module] = {**others, **{f"{task}_{name}": expert for name, expert in experts.items()}}
    losses = flow_losses(experts, ring, context, run.batch, BOUNDARY[task])
    trainer = Trainer(named, losses, peak_lr=run.lr, weight_decay=0.01, init=run.init)
    steps = trainer.run(Clock(run.minutes, run.steps, reserve=8), keep_growing(ring, chunk, seconds, 0.15))
    trainer.finish(run.out)
    print(f"{steps} steps of {run.batch}, {ring.added} clips drawn", flush=True)
    return experts


def build_expert(config: DiTConfig, run: Training) -> WanModel:
    """A freshly initialised expert whose blocks run in bf16 around an fp32 residual; embeddings and head stay fp32."""
    expert = WanModel(config).to(run.device)
    initialise(expert)
    if run.compile:
        before, after = (torch.compile(part, dynamic=False) for part in PLAIN_PARTS)
        for block in expert.blocks:  # all share what is compiled for the first
            block.parts = BlockParts(before, after)

    run_in_bf16(expert, run.device, run.bf16)
    return expert


def run_in_bf16(expert: WanModel, device: torch.device, bf16: bool) -> None:
    """Run the blocks of `expert` in bf16 around a residual that stays as it is, if `bf16`; in operations that have
    gradients in any case, which the fused kernels have not."""
    expert.runners.add(InBf16(device, bf16))


class InBf16:
    """The runner of `run_in_bf16`."""

    name: ClassVar[str] = "autocast"
    place: ClassVar[Place] = Place.GRAPHS

    def __init__(self, device: torch.device, bf16: bool) -> None:
        self.device, self.bf16 = device, bf16

    def __call__(self, inputs: BlockInputs, inner: Run) -> Tensor:
        # Inside a CUDA graph autocast must not keep casts from one call to the next.
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=False)
        with fused.use("torch"), autocast:
            return inner(inputs)


@torch.no_grad()
def initialise(expert: WanModel) -> None:
    """Xavier for matrices, biases and the head zero, as in the reference."""
    for module in expert.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.xavier_uniform_(expert.patch_embedding.weight.flatten(1))
    # Small, so that at first every timestep is treated alike. The embeddings before it keep Xavier's: the reference's
    # 0.02 is meant for widths of thousands.
    projection = expert.time_projection[1]
    assert isinstance(projection, nn.Linear)
    nn.init.normal_(projection.weight, std=0.02)
    nn.init.zeros_(expert.head.head.weight)


# ----------------------------------------------------------------------------------------------------------------- loss


def flow_losses(
    experts: dict[str, WanModel], ring: LatentRing, context: Context, batch: int, boundary: float
) -> Callable[[], dict[str, Tensor]]:
    """Draws a batch of clips and captions; each expert gets its own noise and timesteps. Mean squared error of the
    velocity.
    """
    spans = {"high": (boundary - OVERLAP, 1.0), "low": (0.0, boundary + OVERLAP)}

    def losses() -> dict[str, Tensor]:
        rows = ring.sample(batch)
        text = context(caption_rows(rows["scene"]))
        return {
            name: velocity_loss(
                expert, rows, text, draw_sigmas(batch, *spans[name], TRAINED_SHIFT[name], rows["latent"].device)
            )
            for name, expert in experts.items()
        }

    return losses


def velocity_loss(expert: WanModel, rows: dict[str, Tensor], text: Tensor, sigma: Tensor) -> Tensor:
    latents = rows["latent"]
    noise = torch.randn_like(latents)
    x = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
    if "image" in rows:
        x = torch.cat([x, rows["image"]], dim=1)  # noise, mask, image
    return F.mse_loss(expert(x, 1000 * sigma, text), noise - latents)


def caption_rows(scene: Tensor) -> Tensor:
    """Rows of `token_table` for scenes [B] of TRAINED: mostly the caption, some with a full stop, some that say
    nothing.
    """
    captions = len(TRAINED)
    choice = torch.rand_like(scene, dtype=torch.float32)
    silent = 2 * captions + torch.randint_like(scene, DROPPED_ROWS)
    spoken = torch.where(torch.rand_like(choice) < FULL_STOP_SHARE, scene + captions, scene)
    return torch.where(choice < CAPTION_DROPOUT, silent, spoken)


def draw_sigmas(batch: int, low: float, high: float, shift: float, device: torch.device) -> Tensor:
    """One sigma in [low, high] for each of `batch` equal slices of the range, bent towards noise by `shift`."""
    start, stop = (sigma / (shift - (shift - 1) * sigma) for sigma in (low, high))
    u = (torch.arange(batch, device=device) + torch.rand(batch, device=device)) / batch
    even = start + (stop - start) * u
    return shift * even / (1 + (shift - 1) * even)

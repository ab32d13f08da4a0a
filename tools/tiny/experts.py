"""Phases 2 and 3: the transformers, by flow matching, both experts at once.

x = (1 - sigma) * latents + sigma * noise, velocity = noise - latents, timestep = 1000 * sigma.
Shapes: B batch, z latent channels, T/Y/X latent frames, rows, columns, L text rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from tools.tiny.clips import TRAINED, Drawing, LatentRing, Ring, Size, fill, keep_growing
from tools.tiny.files import part_path, report_sizes, resume_path, round_to_fp16, write_part
from tools.tiny.loop import Clock, Losses, Trainer
from tools.tiny.words import DROPPED_ROWS, TEXT_LEN, token_table, train_tokenizer
from wan_core.checkpoint import load_dit, load_text_encoder, load_vae
from wan_core.models.text.tokenizer import Tokenizer
from wan_core.models.text.umt5 import Attention, FeedForward, RelativePosition, TextConfig, TextEncoder, UMT5Encoder
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import family_of, find_task
from wan_core.models.wan.layers import PLAIN_PARTS, BlockParts
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs, Place, Run
from wan_core.ops.custom_ops import allow_variants
from wan_core.ops.kernels import fused
from wan_core.sampling.steps import Expert

TEXT_DIM = 64
T2V = DiTConfig(
    in_channels=16,
    out_channels=16,
    dim=128,
    ffn_dim=384,
    num_heads=2,
    num_layers=8,
    text_dim=TEXT_DIM,
    text_len=TEXT_LEN,
)
# Narrow, so that all parts together stay below 20 MB; its conditioning already holds the answer to everything but the
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
# Without noise, latents at outlines count so much more: they are few, and what a shape is known by. With noise nobody
# knows where outlines are, and the weights would draw shapes to where there are none: it falls with sigma.
EDGE_WEIGHT = 4.0
# A round of training: one size a step.
ROUND = tuple(
    Size(width=width, height=height)
    for width, height in ((96, 96), (128, 128), (96, 96), (128, 96), (96, 96), (64, 64), (96, 96), (96, 128))
)

Context = Callable[[Tensor], Tensor]  # rows of a token table [B] -> text rows [B, L, TEXT_DIM]


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the command line decides for both phases."""

    out: Path
    init: Path
    sizes: Sequence[Size]  # they take turns, one a step; batch and bank are those of 96x96, others have as many tokens
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
    """Text encoder and both text-to-video experts together -> text_encoder, t2v_high and t2v_low. The experts alone
    where there is a text encoder that is not to be trained on."""
    if part_path(run.init, "text_encoder").is_file() and not resume_path(run.init, "text").is_file():
        write_experts(run.out, "t2v", train_experts(run, "t2v", T2V, finished_text(run), {}))
        return
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
    write_experts(run.out, "i2v", train_experts(run, "i2v", I2V, finished_text(run), {}))


@torch.no_grad()
def finished_text(run: Training) -> Context:
    """The rows of a text encoder that is trained no more."""
    text = load_text_encoder(part_path(run.init, "text_encoder"), device=run.device, dtype=torch.float32)
    tokenizer = Tokenizer(text.tokenizer.proto, TEXT_LEN)
    ids, mask = (t.to(run.device) for t in token_table(tokenizer, [scene.caption for scene in TRAINED]))
    rows = encode_text(text.encoder, ids, mask)
    return lambda row: rows[row]


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
    names: tuple[Expert, Expert] = ("high", "low")
    experts = {name: build_expert(config, run, f"{task}_{name}") for name in names}
    image = find_task(f"{task}-tiny").image == "channels"

    def make(drawing: Drawing, capacity: int) -> LatentRing:
        return LatentRing(drawing, vae, capacity, image=image)

    rings = fill_rings(run, make)
    named: dict[str, nn.Module] = {**others, **{f"{task}_{name}": expert for name, expert in experts.items()}}
    losses = {
        size: flow_losses(experts, ring, context, size.share_of(run.batch), BOUNDARY[task])
        for size, (ring, _, _) in rings.items()
    }
    run_training(run, named, losses, rings)
    return experts


def fill_rings(run: Training, make: Callable[[Drawing, int], Ring]) -> dict[Size, tuple[Ring, int, float]]:
    """A ring for every size with its first clips, its chunk and the seconds that one takes."""
    found: dict[Size, tuple[Ring, int, float]] = {}
    for number, size in enumerate(dict.fromkeys(run.sizes)):
        bank = size.share_of(run.bank * run.sizes.count(size) // max(map(run.sizes.count, run.sizes)))
        ring = make(Drawing(size, run.device, run.seed + 1000 * number), bank)
        chunk = min(size.share_of(64), bank)
        seconds = fill(ring, min(bank, 8192), chunk, 30 * run.sizes.count(size) / len(run.sizes))
        found[size] = ring, chunk, seconds
    return found


def run_training(
    run: Training,
    named: dict[str, nn.Module],
    losses: Mapping[Size, Losses],
    rings: Mapping[Size, tuple[Ring, int, float]],
    share: float = 0.15,
) -> None:
    """Train `named` in rounds over the sizes; all have averaged weights then, and the resume files are written. share:
    of the time, for new clips."""
    turns = [losses[size] for size in run.sizes]
    trainer = Trainer(named, turns, peak_lr=run.lr, weight_decay=0.01, init=run.init)
    steps = trainer.run(
        Clock(run.minutes, run.steps, reserve=8), keep_growing([rings[size] for size in run.sizes], share)
    )
    trainer.finish(run.out)
    drawn = sum(ring.added for ring, _, _ in rings.values())
    print(f"{steps} steps of {run.batch}, {drawn} clips drawn", flush=True)


def build_expert(config: DiTConfig, run: Training, part: str) -> WanModel:
    """An expert whose blocks run in bf16 around an fp32 residual; embeddings and head stay fp32. Its weights are those
    of the finished `part`, or new."""
    expert = family_of(config).model_class(config)(config).to(run.device)
    initialise(expert)
    if part_path(run.init, part).is_file():
        adopt(expert, part_path(run.init, part))
    if run.compile:
        allow_variants(8 * len(set(run.sizes)))
        before, after = (torch.compile(part, dynamic=False) for part in PLAIN_PARTS)
        for block in expert.blocks:  # all share what is compiled for the first
            block.parts = BlockParts(before, after)

    run_in_bf16(expert, run.device, run.bf16)
    expert.rope = cache(expert.rope)  # a graph reads the table of its size for ever; the model keeps only the last one
    return expert


@torch.no_grad()
def adopt(expert: WanModel, path: Path) -> None:
    """The weights of the file `path`. Blocks that it has not got come after its own and change nothing at first."""
    stored = load_dit(path, dtype=torch.float32)
    found = expert.load_state_dict(stored.state_dict(), strict=False)
    added = expert.blocks[len(stored.blocks) :]
    new = tuple(f"blocks.{n}." for n in range(len(stored.blocks), len(expert.blocks)))
    if found.unexpected_keys or not all(name.startswith(new) for name in found.missing_keys):
        raise SystemExit(f"{path} holds another architecture: {found.unexpected_keys[:3]}")
    for block in added:
        for linear in (block.self_attn.o, block.cross_attn.o, block.ffn[2]):
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
    print(f"going on from {path}, {len(added)} blocks more", flush=True)


def run_in_bf16(expert: WanModel, device: torch.device, bf16: bool) -> None:
    """Run the blocks of `expert` in bf16 around a residual that stays as it is, if `bf16`; in operations that have
    gradients in any case, which the fused kernels have not."""
    expert.runners.add(InBf16(device, bf16))


class InBf16:
    """The runner of `run_in_bf16`."""

    name: ClassVar[str] = "autocast"
    place: ClassVar[Place] = Place.RESIDUALS

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
    experts: Mapping[Expert, WanModel], ring: Ring, context: Context, batch: int, boundary: float
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
    error = expert(x, 1000 * sigma, text) - (noise - latents)
    return (outline_weights(rows["outline"], sigma) * error.square()).mean()


def outline_weights(outline: Tensor, sigma: Tensor) -> Tensor:
    """How much each position of latents counts at `sigma` [B]: [B, 1, T, Y, X], of mean 1 in a video. outline: bool, of
    that shape, as of `outline_rows`."""
    weight = 1 + EDGE_WEIGHT * (1 - sigma.view(-1, 1, 1, 1, 1)) * outline
    return weight / weight.mean((1, 2, 3, 4), keepdim=True)


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

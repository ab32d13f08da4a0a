"""Distillation: low-rank additions to both text-to-video experts, with which 4 Euler steps without guidance land where
40 steps with guidance do.

The teacher's path from noise to video is deterministic, so the student can be shown it: the student runs its 4 steps
from the teacher's noise, and every latent on its way is compared with the teacher's at the same sigma, the last one
most. The gradient goes through all 4 forwards and through both experts.

Shapes: B batch, z latent channels, T/Y/X latent frames, rows, columns, S text rows, r rank.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tools.tiny.clips import TRAINED, Ring, Size, fill, keep_growing
from tools.tiny.experts import FULL_STOP_SHARE, encode_text, run_in_bf16
from tools.tiny.files import part_path
from tools.tiny.loop import Clock, Trainer
from tools.tiny.words import TEXT_LEN, token_table
from wan_core.checkpoint import load_dit, load_text_encoder, load_vae, open_checkpoint
from wan_core.checkpoint.save import write_safetensors
from wan_core.models.text.tokenizer import Tokenizer
from wan_core.models.wan.model import WanModel
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import Progress, Ready, denoise
from wan_core.sampling.guided import Branching
from wan_core.sampling.plan import Expert, Plan, make_plan

TASK = "t2v-tiny"
EXPERTS: tuple[Expert, Expert] = ("high", "low")
TARGETS = re.compile(r"blocks\.\d+\.((self|cross)_attn\.[qkvo]|ffn\.[02])|head\.head")
ALPHA = 8.0  # of a file's rank: the product of its factors counts ALPHA / rank
SOFT = 0.1  # of an error in latents (their standard deviation is 1): square below, absolute above, so edges stay sharp
PATH_WEIGHT = 0.3  # of the latents on the way, against 1 for the last
CHECK_SECONDS = 20.0  # between two looks at pairs that are not trained on


def student_plan(steps: int = 4) -> Plan:
    """What the student is trained for: 4 steps are timesteps 1000, 937.5, 833.3 and 625, two for each expert."""
    return make_plan(task=TASK, steps=steps, solver="euler", shift=5.0, guidance_high=1.0, guidance_low=1.0)


def teacher_plan(steps: int = 40, guidance: float = 3.0) -> Plan:
    return make_plan(task=TASK, steps=steps, solver="unipc", shift=5.0, guidance_high=guidance, guidance_low=guidance)


@dataclass(frozen=True, kw_only=True)
class Distillation:
    """What the command line decides."""

    out: Path
    init: Path  # the folder of the model to distil
    size: Size
    device: torch.device
    minutes: float
    reserve: float  # seconds of `minutes` kept back for what follows training
    steps: int | None
    batch: int
    lr: float
    rank: int
    bank: int  # pairs kept on the device
    start: int  # pairs made before training starts
    share: float  # of the training time spent on new pairs
    checks: int  # pairs that are not trained on
    teacher: Plan
    seed: int
    bf16: bool


# ---------------------------------------------------------------------------------------------------------------- pairs


class PairRing(Ring):
    """The teacher's paths: {"noise": [B, z, T, Y, X], "path": [B, steps, z, T, Y, X], its latents at the end of each of
    the student's steps, "caption": [B], rows of a token table}."""

    def __init__(
        self,
        capacity: int,
        *,
        teacher: Plan,
        student: Plan,
        experts: dict[Expert, WanModel],
        text: Tensor,
        silence: Tensor,
        shape: tuple[int, ...],
        seed: int,
    ) -> None:
        """text: rows of every caption and of every caption with a full stop, [2 N, S, D]; silence: of the empty prompt,
        [1, S, D]; shape: of one video's latents."""
        super().__init__(capacity)
        self.teacher, self.student, self.experts = teacher, student, experts
        self.text, self.silence, self.shape = text, silence, shape
        self.generator = torch.Generator(text.device).manual_seed(seed)

    @torch.no_grad()
    def grow(self, count: int) -> None:
        device, captions = self.text.device, len(self.text) // 2
        caption = torch.randint(captions, (count,), generator=self.generator, device=device)
        spoken = torch.rand(count, generator=self.generator, device=device) < FULL_STOP_SHARE
        caption = torch.where(spoken, caption + captions, caption)
        noise = torch.randn(count, *self.shape, generator=self.generator, device=device)
        conditioning = Conditioning(cond=self.text[caption], uncond=self.silence)
        path = teacher_path(self.teacher, self.student, self.experts, conditioning, noise)
        self.add(noise=noise, path=path, caption=caption)


def teacher_path(
    teacher: Plan, student: Plan, experts: dict[Expert, WanModel], conditioning: Conditioning, noise: Tensor
) -> Tensor:
    """The teacher's latents at the end of every step of the student, [B, steps, z, T, Y, X].

    Schedules that differ have different sigmas; each of the student's is reached from the teacher's nearest in a
    straight line (5e-4 away at most for UniPC with 40 steps, which starts just below 1, against Euler with 4).
    """
    stops: dict[int, list[tuple[int, float]]] = {}  # teacher's step: student's steps that end there, and their sigmas
    for step in student.steps:
        near = min(teacher.steps, key=lambda s: abs(s.sigma_next - step.sigma_next))
        stops.setdefault(near.index, []).append((step.index, step.sigma_next))
    path = noise.new_empty(len(noise), len(student.steps), *noise.shape[1:])

    def on_step(progress: Progress) -> None:
        for index, sigma in stops.get(progress.step.index, ()):
            path[:, index] = progress.latents + progress.velocity * (sigma - progress.step.sigma_next)

    owner, both = Ready(experts.__getitem__), Branching(batched=True)
    denoise(teacher, owner, conditioning, noise, branching=both, on_step=on_step)
    return path


# -------------------------------------------------------------------------------------------------------------- student


class LowRank(nn.Module):
    """weight -> weight + alpha / r * up @ down, in the weight's dtype. Zero at first.

    Added to the weight and not to the output: a weight is far smaller than the tokens that pass it."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        device = linear.weight.device
        bound = linear.in_features**-0.5
        self.down = nn.Parameter(torch.empty(rank, linear.in_features, device=device).uniform_(-bound, bound))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank, device=device))
        self.scale = ALPHA / rank

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            return weight + self.scale * (self.up @ self.down)


class Adapter(nn.Module):
    """Low-rank additions to the linears of one expert, whose own weights are frozen."""

    def __init__(self, expert: WanModel, rank: int) -> None:
        super().__init__()
        expert.requires_grad_(False)
        linears = [(n, m) for n, m in expert.named_modules() if isinstance(m, nn.Linear) and TARGETS.fullmatch(n)]
        self.names = [name for name, _ in linears]
        self.factors = nn.ModuleList()
        for _, linear in linears:
            added = LowRank(linear, rank)
            parametrize.register_parametrization(linear, "weight", added)
            self.factors.append(added)

    def tensors(self) -> dict[str, Tensor]:
        """The factors as a file holds them, bf16, under the names that ComfyUI and LightX2V give them."""
        found: dict[str, Tensor] = {}
        for name, factors in zip(self.names, self.factors, strict=True):
            assert isinstance(factors, LowRank)
            found[f"diffusion_model.{name}.lora_down.weight"] = factors.down.detach().bfloat16()
            found[f"diffusion_model.{name}.lora_up.weight"] = factors.up.detach().bfloat16()
            found[f"diffusion_model.{name}.alpha"] = torch.tensor(ALPHA, dtype=torch.bfloat16)
        return found


def lora_path(folder: Path, expert: Expert) -> Path:
    return folder / f"t2v_4step_lora_{expert}_noise.safetensors"


def write_lora(adapter: Adapter, folder: Path, expert: Expert, plan: Plan) -> None:
    metadata = {
        "format": "pt",
        "base_model": TASK,
        "expert": expert,
        "distilled": f"{len(plan.steps)}-step",
        "steps": str(len(plan.steps)),
        "solver": plan.solver,
        "shift": f"{plan.shift:g}",
        "guidance": "1",
    }
    write_safetensors(adapter.tensors(), lora_path(folder, expert), metadata)


def merge_lora(expert: WanModel, path: Path) -> None:
    """Add a file of `write_lora` to the weights of `expert`."""
    with open_checkpoint(path) as opened, torch.no_grad():
        tensors = {name: opened.read(name) for name in opened.tensors}
        for name in [n.removesuffix(".alpha") for n in tensors if n.endswith(".alpha")]:
            down, up = (tensors[f"{name}.lora_{part}.weight"].float() for part in ("down", "up"))
            weight = expert.get_parameter(f"{name.removeprefix('diffusion_model.')}.weight")
            weight += (tensors[f"{name}.alpha"].float() / len(down) * (up @ down)).to(weight)


def rollout(plan: Plan, experts: dict[Expert, WanModel], text: Tensor, noise: Tensor) -> list[Tensor]:
    """The latents after every Euler step of `plan` from `noise`, with gradients. text: [B, S, D]."""
    x, states = noise, []
    for phase in plan.phases:
        expert = experts[phase[0].expert]
        prepared = expert.prepare_text(text)
        for step in phase:
            timestep = torch.full((len(x),), step.timestep, device=x.device)
            x = x + (step.sigma_next - step.sigma) * expert(x, timestep, prepared)
            states.append(x)
    return states


def path_losses(
    plan: Plan, experts: dict[Expert, WanModel], ring: Ring, text: Tensor, batch: int
) -> Callable[[], dict[str, Tensor]]:
    """Draws a batch of pairs: how far the student's latents are from the teacher's after each step.

    A latent at sigma is (1 - sigma) of video: divided by that, an error counts what it will be in the video.
    """

    def losses() -> dict[str, Tensor]:
        rows = ring.sample(batch)
        found: dict[str, Tensor] = {}
        for step, state in zip(plan.steps, rollout(plan, experts, text[rows["caption"]], rows["noise"]), strict=True):
            error = (state - rows["path"][:, step.index]) / (1 - step.sigma_next)
            last = step.sigma_next == 0
            weight = 1.0 if last else PATH_WEIGHT
            found["end" if last else f"at {step.sigma_next:.4g}"] = weight * soft_absolute(error)
        return found

    return losses


def soft_absolute(error: Tensor) -> Tensor:
    return ((error.square() + SOFT**2).sqrt() - SOFT).mean()


@torch.no_grad()
def final_error(plan: Plan, experts: dict[Expert, WanModel], ring: Ring, text: Tensor, batch: int) -> float:
    """Root mean square distance of the student's videos from the teacher's, over all rows of `ring`."""
    rows, total = ring.rows, 0.0
    for start in range(0, ring.added, batch):
        part = slice(start, min(start + batch, ring.added))
        latents = rollout(plan, experts, text[rows["caption"][part]], rows["noise"][part])[-1]
        total += float((latents - rows["path"][part, -1]).square().mean()) * len(latents)
    return (total / ring.added) ** 0.5


# ------------------------------------------------------------------------------------------------------------ training


@torch.no_grad()
def latent_shape(run: Distillation) -> tuple[int, ...]:
    vae = load_vae(part_path(run.init, "vae"), device=run.device, dtype=torch.float32)
    video = torch.zeros(1, 3, run.size.frames, run.size.height, run.size.width, device=run.device)
    return tuple(vae.encode(video, chunk=None).shape[1:])


def load_experts(run: Distillation) -> dict[Expert, WanModel]:
    loaded: dict[Expert, WanModel] = {}
    for name in EXPERTS:
        loaded[name] = load_dit(part_path(run.init, f"t2v_{name}"), device=run.device, dtype=torch.float32)
    return loaded


def distill(run: Distillation) -> dict[str, float | int]:
    """Train, and leave `lora_path(run.out, ...)` of both experts: at every look that finds them better than before, so
    that a run that is cut short leaves a result. Returns what it did, in numbers."""
    student, teacher = student_plan(), run.teacher
    teachers, experts = load_experts(run), load_experts(run)
    for expert in (*teachers.values(), *experts.values()):
        run_in_bf16(expert, run.device, run.bf16)
    adapters: dict[Expert, Adapter] = {name: Adapter(expert, run.rank) for name, expert in experts.items()}
    text, silence = caption_texts(run)

    def pairs(capacity: int, seed: int) -> PairRing:
        return PairRing(
            capacity,
            teacher=teacher,
            student=student,
            experts=teachers,
            text=text,
            silence=silence,
            shape=latent_shape(run),
            seed=seed,
        )

    kept = pairs(run.checks, run.seed + 1)
    kept.grow(run.checks)
    before = final_error(student, experts, kept, text, run.batch)
    print(f"the student is {before:.4f} from its teacher before training", flush=True)
    ring = pairs(run.bank, run.seed)
    chunk = min(run.batch, run.bank)
    per_chunk = fill(ring, run.start, chunk, 60 * run.minutes / 4)

    losses = path_losses(student, experts, ring, text, run.batch)
    named: dict[str, nn.Module] = {f"lora_{name}": adapter for name, adapter in adapters.items()}
    trainer = Trainer(named, [losses], peak_lr=run.lr, init=run.out)
    grow = keep_growing([(ring, chunk, per_chunk)], run.share)
    best, looked = float("inf"), time.monotonic()

    def look(step: int) -> None:
        nonlocal best, looked
        with averaged(trainer):
            error = final_error(student, experts, kept, text, run.batch)
            better = error < best
            if better:
                best = error
                for name, adapter in adapters.items():
                    write_lora(adapter, run.out, name, student)
        looked = time.monotonic()
        print(f"step {step}: {error:.4f} from the teacher{', written' if better else ''}", flush=True)

    def between(step: int) -> None:
        grow(step)
        if step and time.monotonic() - looked > CHECK_SECONDS:
            look(step)

    steps = trainer.run(Clock(run.minutes, run.steps, reserve=run.reserve), between)
    look(steps)
    trainer.finish(run.out)
    return {
        "training_steps": steps,
        "batch": run.batch,
        "rank": run.rank,
        "pairs": ring.added,
        "error_before": round(before, 4),
        "error_after": round(best, 4),
    }


def caption_texts(run: Distillation) -> tuple[Tensor, Tensor]:
    """Text rows of the captions that may be trained on, plain and with a full stop [2 N, S, D], and of the empty prompt
    [1, S, D]."""
    text = load_text_encoder(part_path(run.init, "text_encoder"), device=run.device, dtype=torch.float32)
    tokenizer = Tokenizer(text.tokenizer.proto, TEXT_LEN)
    ids, mask = (t.to(run.device) for t in token_table(tokenizer, [scene.caption for scene in TRAINED]))
    with torch.no_grad():
        rows = encode_text(text.encoder, ids, mask)
    return rows[: 2 * len(TRAINED)], rows[2 * len(TRAINED) : 2 * len(TRAINED) + 1]


@contextmanager
def averaged(trainer: Trainer) -> Iterator[None]:
    """The trained parameters are their moving average inside, rounded as a file will hold them."""
    raw = [parameter.detach().clone() for parameter in trainer.parameters]
    with torch.no_grad():
        for parameter, average in zip(trainer.parameters, trainer.average, strict=True):
            parameter.copy_(average.bfloat16())
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(trainer.parameters, raw, strict=True):
                parameter.copy_(value)

"""Where the weights of a run will be: sizes of its models and of what runs beside them, from headers alone, to a memory
plan and the residency that follows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, Protocol, cast

import torch

from wan_core.config import QUANTIZED, LoadOptions, OptionError
from wan_core.execution.memory.planning import (
    FACTORS,
    LATENTS,
    Beside,
    MemoryPlan,
    Sizes,
    beside_weights,
    device_room,
    factor,
    plan_memory,
    unit_bytes,
)
from wan_core.execution.memory.residency import Residency
from wan_core.execution.report import Report
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.quant.swap import Quantization
from wan_core.parallel.mesh import RankMesh
from wan_core.pipeline.resolved_request import Job
from wan_core.pipeline.sources import Part, Parts, is_packed
from wan_core.sampling.cache.residual import residual_bytes


class Planned(Protocol):
    """The memory plan for a job (None: the task's own size), with what is held already, if anything is."""

    def __call__(self, job: Job | None, held: Residency | None = None) -> MemoryPlan: ...


def make_residency(
    parts: Parts,
    options: LoadOptions,
    report: Report,
    job: Job | None,
    planned: Planned | None,
    ranks: RankMesh | None,
    *,
    shards: bool,
) -> tuple[Residency, bool]:
    """Where the weights will be, by the memory plan; on a CPU they stay, unless streaming is asked for. And whether
    ranks hold the experts in parts, which they may if `shards`."""
    device = report.device
    if options.residency == "shard":
        report.notes.append("residency: shard (asked for)")
        return Residency(device, "resident"), True
    if planned is None:
        blocks = parts.dit.num_layers if options.resident_blocks is None else options.resident_blocks
        if blocks > parts.dit.num_layers or blocks < 0:
            raise OptionError(f"{blocks} resident blocks given; the transformer has {parts.dit.num_layers}")
        streams = options.residency == "stream" or options.resident_blocks is not None
        blocks = blocks if options.resident_blocks is not None else 0
        report.notes.append(f"residency: {'stream' if streams else 'resident'} (weights are in host memory on a CPU)")
        return Residency(device, "stream" if streams else "resident", resident_blocks=blocks), False
    plan = planned(job)
    if ranks is not None:
        # By the fullest device, for all of them: what one rank has no room for, none may count on.
        places = ("resident", "swap", "stream")
        worst = places[int(ranks.agree(places.index(plan.policy)))]
        blocks = int(ranks.agree(plan.resident_blocks if plan.policy == "stream" else 1 << 20, largest=False))
        if worst != "resident" and options.residency == "auto" and shards:
            report.notes.append(f"residency: shard ({plan.why}; the ranks of a sequence hold the experts in parts)")
            return Residency(device, "resident"), True
        if worst != plan.policy:
            report.notes.append(f"residency: {worst} (another rank has no room for more)")
            return Residency(device, worst, resident_blocks=blocks if worst == "stream" else 0), False
    report.notes += [f"residency: {plan.policy} ({plan.why})", plan.table()]
    room = plan.room if plan.together else None
    made = Residency(device, plan.policy, resident_blocks=plan.resident_blocks, room=room, beside=plan.beside)
    return made, False


def plan_models(
    parts: Parts,
    options: LoadOptions,
    dtypes: Mapping[str, torch.dtype],
    precision: str,
    device: torch.device | int,
    job: Job | None,
    held: Residency | None = None,
    held_as: Mapping[str, Quantization | None] | None = None,
    extra: int = 0,
) -> MemoryPlan:
    """The memory plan of `parts` for `job` (None: the task's own size). device: a GPU, or the bytes that one has. held:
    what a plan made before has put there; it stays as it is while `job` fits. held_as: how each part is held. extra:
    bytes of LoRAs."""
    quantized, itemsize = precision in QUANTIZED, dtypes["high"].itemsize
    held_as = held_as or {}
    units = unit_bytes(parts.dit, itemsize, quantized, options.keep_blocks)
    kept = held_as.get("high")
    if is_packed(kept):
        units = packed_units(parts.of["high"], dtypes["high"], kept)
    sizes = Sizes(
        units=units,
        experts=1 + ("low" in parts.of),
        text_encoder=parts.of["text_encoder"].bytes(dtypes["text_encoder"], held_as.get("text_encoder")),
        vae=parts.of["vae"].bytes(dtypes["vae"]),
        clip_vision=parts.of["clip_vision"].bytes(dtypes["clip_vision"]) if "clip_vision" in parts.of else 0,
    )
    per_token = factor(parts.dit, itemsize=itemsize, device="cuda", compile=options.compile, precision=precision)
    beside = beside_job(parts, job, per_token, itemsize)
    beside = replace(beside, denoise=beside.denoise + extra)
    mode = cast(Literal["auto", "resident", "swap", "stream"], options.residency)
    available = device if isinstance(device, int) else device_room(device, options.memory_limit)
    if held is not None:
        available += held.weights_on_device()
        blocks = held.resident_blocks if held.policy == "stream" else None
        same = plan_memory(sizes, beside, available, held.policy, blocks, together=held.room is not None)
        if same.denoises:
            return same
    return plan_memory(sizes, beside, available, mode, options.resident_blocks)


def packed_units(part: Part, dtype: torch.dtype, quantization: Quantization | None) -> tuple[int, ...]:
    """As `unit_bytes`, of a transformer that stays as its file packs it."""
    config = cast(DiTConfig, part.config)
    rest, blocks = unit_bytes(config, dtype.itemsize, False)[0], config.num_layers
    return (rest, *[max(0, part.bytes(dtype, quantization) - rest) // blocks] * blocks)


def beside_job(parts: Parts, job: Job | None, per_token: float, itemsize: int) -> Beside:
    """What runs beside the weights."""
    if job is None:
        stride, task = parts.vae.spatial_stride, parts.task
        T, Y, X = (task.frames - 1) // parts.vae.temporal_stride + 1, task.height // stride, task.width // stride
        return beside_weights(parts.dit, parts.vae, (1, parts.vae.z_dim, T, Y, X), per_token=per_token)
    return beside_weights(
        parts.dit,
        parts.vae,
        job.latent_shape,
        per_token=per_token,
        itemsize=itemsize,
        guided=job.plan.guided,
        residuals=residual_bytes(job.plan, job.tokens, parts.dit.dim, itemsize),
        batched=job.batched,
        image=job.request.image is not None or job.request.last_image is not None,
    )


def forward_bytes(config: DiTConfig, tokens: int, per_token: float = FACTORS["torch"]) -> int:
    """What a forward of so many tokens needs besides weights, bf16, both branches' text included. per_token: of
    `budget.factor`; by default what is most."""
    text = 2 * 2 * 2 * config.num_layers * config.context_len * config.dim
    return int(per_token * 2 * tokens * config.dim + text + LATENTS * min(1.0, tokens / 32760))


def decode_bytes(config: VAEConfig, rows: int, columns: int) -> int:
    """A generous estimate of what decoding or encoding latents of `rows` x `columns` takes besides weights, bf16: 10.5
    GiB for the 2.1 VAE at 720p, where 7.5 were measured, and 6.9 for the 2.2 VAE, where 6.5 were."""
    pixels = rows * columns * config.spatial_stride**2 // config.patch**2
    return 16 * 2 * pixels * config.temporal_stride * max(config.encoder_dim, config.decoder_dim)

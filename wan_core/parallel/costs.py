"""Chooses the mesh for a number of GPUs by an estimate from measured speeds (docs/parallel.md).

- Matmuls and memory passes are divided among shards; the ends of a forward (patches, head) are not.
- Attention is divided by the ring, and by Ulysses in whole heads: 40 heads on 3 ranks are 14, 13 and 13.
- Ulysses sends q, k, v and the output, without overlap with computation.
- A ring sends keys and values while attention with the previous ones runs, and has a cost for merging.
- Sparse attention runs its own kernel, also where it reads nearly all blocks and dense attention is faster.
- Sparse attention reads fewer blocks, but a ring still sends all keys and values; in a ring it computes in bf16.
- A layer pipeline and parallel steps (time) are taken by name alone.
- The host needs a fixed time to launch a block, so small videos are not faster on many GPUs.

Legend: L tokens, C channels, N channels of the feed-forward, H heads, R ring, U ulysses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wan_core.config import OptionError
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.attention.sparse.kernels import BLOCK, SMALL
from wan_core.parallel.mesh import Mesh
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.schedule import CHOICE, KERNEL, beyond_means

BYTES = 2  # bytes of a bf16 number
# As KERNEL and CHOICE, for the bf16 kernel relative to the fastest dense one
# (benchmarks/results/archive/sparse-h200-20261120.json).
KERNEL_BF16, CHOICE_BF16 = 1.15, 0.05
CLOSE = 1.01  # meshes whose time is within this factor of the shortest count as equal


@dataclass(frozen=True)
class Speeds:
    """Measured speeds of one GPU and its links: FLOP/s, bytes/s and seconds."""

    linears: float = 780e12
    linears_fp8: float = 1370e12
    attention: float = 655e12
    attention_fp8: float = 830e12
    memory: float = 4.26e12
    ring: float = 1.04  # factor on attention's time in a ring, because keys are sent at the same time
    part: float = 1.1e-3  # fixed seconds per block for every ring part except the first
    passes: float = 49.0  # number of passes of a bf16 [L, C] tensor through memory between a block's matmuls
    link: float = 290e9  # bytes/s from one GPU to GPUs of the same host
    network: float = 45e9  # bytes/s to another host, with a 400 Gbit/s card per GPU; not measured
    latency: float = 30e-6  # seconds of one exchange
    launch: float = 2e-3  # seconds in which the host launches a block
    ends: float = 1.6e-11  # seconds per token and channel for the parts of a forward that are not sharded


# Measured on up to four H200, except `network`; `part` is from benchmarks/results/parallel-h200-*.json.
H200 = Speeds()


@dataclass(frozen=True)
class MeshChoice:
    """The mesh, and the estimated seconds of one step (all branches) on it and on one GPU; None: not estimated. note:
    a further remark for the user."""

    mesh: Mesh
    seconds: float | None = None
    single: float | None = None
    note: str = ""

    def words(self) -> str:
        if self.seconds is None or self.single is None:
            return self.mesh.describe()
        return (
            f"{self.mesh.describe()}, estimated {self.single / self.seconds:.2f} times as fast as one GPU "
            f"({self.seconds:.2f} s a step, {self.single:.2f} s on one)"
        )


def choose_mesh(
    gpus: int,
    config: DiTConfig,
    tokens: int,
    *,
    paired: float = 1.0,
    fp8_linears: bool = False,
    fp8_attention: bool = False,
    gpus_per_host: int | None = None,
    speeds: Speeds | None = H200,
    rings: bool = True,
    reads: Mapping[float, float] | None = None,
) -> MeshChoice:
    """The mesh for `auto`: the one of `gpus` GPUs with the shortest step.

    tokens: of one video. paired: the share of forwards in steps with both guidance branches; 0 without guidance.
    speeds: None for an unknown device (a CPU): the first mesh in order of preference is taken, without an estimate.
    rings: whether the attention backend supports ring attention. reads: result of `shares_read`; None: dense attention.
    Raises OptionError.
    """
    if gpus < 1:
        raise OptionError(f"{gpus} GPUs given; at least 1 is needed")
    meshes = [mesh for mesh in all_meshes(gpus, config, tokens, rings) if mesh.cfg == 1 or paired > 0]
    if not meshes:
        raise OptionError(
            f"{gpus} GPUs cannot divide {tokens} tokens of a model with {config.num_heads} heads: use fewer GPUs, "
            "or an attention backend that supports a ring"
        )
    if speeds is None:
        return MeshChoice(meshes[0])
    fp8 = {"fp8_linears": fp8_linears, "fp8_attention": fp8_attention}

    def seconds(mesh: Mesh) -> float:
        return step_seconds(
            mesh, config, tokens, speeds, paired=paired, gpus_per_host=gpus_per_host or gpus, reads=reads, **fp8
        )

    estimates = [(seconds(mesh), mesh) for mesh in meshes]
    shortest = min(estimate for estimate, _ in estimates)
    best, mesh = next((s, m) for s, m in estimates if s <= shortest * CLOSE)  # the first in order of preference
    single = seconds(Mesh())
    if gpus > 1 and best >= single:
        raise OptionError(
            f"{mesh.describe()} would be slower than one GPU for {tokens} tokens: an estimated {best * 1e3:.0f} ms per "
            f"step, {single * 1e3:.0f} ms on one. Use one GPU or a larger video, or name a mesh to use it anyway."
        )
    return MeshChoice(mesh, best, single)


def step_seconds(
    mesh: Mesh,
    config: DiTConfig,
    tokens: int,
    speeds: Speeds = H200,
    *,
    paired: float = 1.0,
    gpus_per_host: int = 8,
    reads: Mapping[float, float] | None = None,
    fp8_linears: bool = False,
    fp8_attention: bool = False,
) -> float:
    """Estimated seconds of a step with two forwards on `mesh`. The other arguments are as in `choose_mesh`."""
    fp8 = {"fp8_linears": fp8_linears, "fp8_attention": fp8_attention}
    forward = sum(
        share * forward_seconds(mesh, config, tokens, speeds, gpus_per_host, **fp8, read=read)
        for read, share in (reads or {1.0: 1.0}).items()
    )
    forwards = paired / mesh.cfg + (1 - paired)
    return 2 * forwards * forward + (mesh.cfg > 1) * speeds.latency


def all_meshes(gpus: int, config: DiTConfig, tokens: int, rings: bool = True) -> list[Mesh]:
    """All possible meshes in order of preference: split guidance first, then large Ulysses groups, then the ring."""
    meshes = []
    for cfg in (2, 1):
        shards = gpus // cfg
        if gpus % cfg or shards > tokens:
            continue
        for ulysses in range(min(shards, config.num_heads), 0, -1):
            if shards % ulysses == 0 and (rings or ulysses == shards):
                meshes.append(Mesh(cfg, shards // ulysses, ulysses))
    # Among equals, meshes that divide the heads evenly come first.
    return sorted(meshes, key=lambda mesh: (-mesh.cfg, config.num_heads % mesh.ulysses != 0))


def shares_read(plan: Plan, tokens: int) -> dict[float, float]:
    """Share of the key blocks read -> the share of `plan`'s attention (over all forwards) that reads it. The
    choice by error and slopes count as blocks that take as long."""
    if plan.sparse is None or tokens < SMALL or not plan.forwards:  # sparsity saves no time for few tokens
        return {1.0: 1.0}
    shares: dict[float, float] = {}
    beyond = beyond_means(plan.sparse.slope) / KERNEL
    for step in plan.steps:
        share = (step.forwards - step.passes) / plan.forwards
        shares[1.0] = shares.get(1.0, 0.0) + step.passes / plan.forwards
        read = 1 - step.sparsity + beyond if step.sparsity else 1.0
        shares[read] = shares.get(read, 0.0) + share
    return shares


def forward_seconds(
    mesh: Mesh,
    config: DiTConfig,
    tokens: int,
    speeds: Speeds = H200,
    gpus_per_host: int = 8,
    *,
    fp8_linears: bool = False,
    fp8_attention: bool = False,
    read: float = 1.0,
) -> float:
    """Estimated seconds of one branch's forward on `mesh`. read: share of blocks; 1: all, by the dense kernel."""
    L, C, N, H, R, U = tokens, config.dim, config.ffn_dim, config.num_heads, mesh.ring, mesh.ulysses
    shard = -(-L // mesh.shards)
    channels = -(-H // U) * config.head_dim  # of the rank with the most heads, during attention
    linears = 2 * shard * (6 * C * C + 2 * C * N) / (speeds.linears_fp8 if fp8_linears else speeds.linears)
    passes = speeds.passes * shard * C * BYTES / speeds.memory
    fp8_kernel = fp8_attention and (R == 1 or read == 1)
    one_round = 4 * (-(-L // R)) ** 2 * channels / (speeds.attention_fp8 if fp8_kernel else speeds.attention)
    if read != 1:
        one_round *= KERNEL * read + CHOICE if fp8_kernel else KERNEL_BF16 * read + CHOICE_BF16
    wide = BYTES // 2 if fp8_attention else BYTES
    exchange = 0.0
    if U > 1:
        link = speeds.link if gpus_per_host >= U else speeds.network
        moved = 4 * shard * C * wide * (U - 1) / U
        exchange = moved / link + 2 * moved / speeds.memory + (4 if fp8_attention else 2) * speeds.latency
    merge = 0.0
    hop = 0.0
    if R > 1:
        one_round *= speeds.ring
        link = speeds.link if gpus_per_host >= mesh.shards else speeds.network
        hop = 2 * -(-L // R) * channels * wide / link + speeds.latency
        merge = R * 10 * -(-L // R) * channels / speeds.memory + (R - 1) * speeds.part
        if read != 1:  # means and variances of blocks of keys and values in float32, gathered to select blocks
            merge += 4 * 4 * (R - 1) * -(-L // (R * BLOCK)) * channels / link + 2 * speeds.latency
    attention = one_round + (R - 1) * max(one_round, hop) + merge
    block = linears + passes + exchange + attention
    if mesh.shards > 1:
        block = max(block, speeds.launch)
    return config.num_layers * block + speeds.ends * L * C

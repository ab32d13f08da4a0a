"""Which mesh for how many GPUs: an estimate from measured speeds, explicit enough to argue with.

A step is estimated for every mesh of the given size, and `choose_mesh` takes the shortest; where several are within
one percent, the one that cuts guidance first, then heads (Ulysses), then the ring. It refuses a mesh that would be
slower than one GPU, in numbers. What it knows:

- products and passes over memory shrink with the shard; the ends of a forward (patches, head) do not;
- attention shrinks with the ring, and with Ulysses as far as heads divide: 40 heads on 3 ranks are 14, 13 and 13;
- Ulysses moves q, k, v and the output, and nothing is computed meanwhile;
- a ring moves keys and values while attention of the last ones runs, and pays for merging;
- sparse attention shrinks what is read and not what a ring moves, which is all keys and values; in a ring it reads in
  bf16;
- the host launches a block in a time that no GPU shortens: small videos are not faster on many GPUs.

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
from wan_core.sampling.sparsity.schedule import CHOICE, KERNEL

BYTES = 2  # of a number in bf16
# As KERNEL and CHOICE, of the bf16 kernel against the fastest dense one (benchmarks/results/sparse-h200-20261120.json).
KERNEL_BF16, CHOICE_BF16 = 1.15, 0.05
CLOSE = 1.01


@dataclass(frozen=True)
class Speeds:
    """What one GPU and its links do: operations and bytes in a second, seconds."""

    linears: float = 780e12
    linears_fp8: float = 1370e12
    attention: float = 655e12
    attention_fp8: float = 830e12
    memory: float = 4.26e12
    ring: float = 1.04  # of attention in parts, with keys on the move beside it
    part: float = 1.1e-3  # of every part of a ring but the first, in a block: what does not shrink with it
    passes: float = 49.0  # of one bf16 [L, C] tensor through memory that a block makes between its products
    link: float = 290e9  # out of one GPU, to GPUs of its host
    network: float = 45e9  # to another host; a 400 Gbit/s card for each GPU, not measured
    latency: float = 30e-6  # of one exchange
    launch: float = 2e-3  # of a block by the host, where a CUDA graph does not do it
    ends: float = 1.6e-11  # of a forward, for each token and channel: what is not sharded


H200 = (
    Speeds()
)  # measured on up to four of them, but for `network`; `part` from benchmarks/results/parallel-h200-*.json


@dataclass(frozen=True)
class MeshChoice:
    """The mesh, and estimated seconds of one step (all its branches) on it and on one GPU; None: not estimated. note:
    what else a user should know of it."""

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
    """What `auto` stands for: the mesh of `gpus` that makes a step shortest.

    tokens: of one video. paired: the share of forwards that belong to steps with both branches of guidance; 0 without
    guidance. speeds: None where nothing is known of the device (a CPU): then the order of preference decides, and
    nothing is refused. rings: whether the attention backend can be part of a ring. reads: as `shares_read` has it;
    None: everything is read. Raises OptionError.
    """
    if gpus < 1:
        raise OptionError(f"{gpus} GPUs given; at least 1 is needed")
    meshes = [mesh for mesh in all_meshes(gpus, config, tokens, rings) if mesh.cfg == 1 or paired > 0]
    if not meshes:
        raise OptionError(
            f"{gpus} GPUs cannot share {tokens} tokens of a model with {config.num_heads} heads: use fewer, "
            "or an attention backend that can be part of a ring"
        )
    if speeds is None:
        return MeshChoice(meshes[0])
    fp8 = {"fp8_linears": fp8_linears, "fp8_attention": fp8_attention}

    def seconds(mesh: Mesh) -> float:
        forwards = paired / mesh.cfg + (1 - paired)
        forward = sum(
            share * forward_seconds(mesh, config, tokens, speeds, gpus_per_host or gpus, **fp8, read=read)
            for read, share in (reads or {1.0: 1.0}).items()
        )
        return 2 * forwards * forward + (mesh.cfg > 1) * speeds.latency

    estimates = [(seconds(mesh), mesh) for mesh in meshes]
    shortest = min(estimate for estimate, _ in estimates)
    best, mesh = next((s, m) for s, m in estimates if s <= shortest * CLOSE)  # they are in order of preference
    single = seconds(Mesh())
    if gpus > 1 and best >= single:
        raise OptionError(
            f"{mesh.describe()} would be slower than one GPU for {tokens} tokens: an estimated {best * 1e3:.0f} ms a "
            f"step, {single * 1e3:.0f} on one. Use one GPU, a larger video, or name a mesh to have it anyway."
        )
    return MeshChoice(mesh, best, single)


def all_meshes(gpus: int, config: DiTConfig, tokens: int, rings: bool = True) -> list[Mesh]:
    """Those that can run, in order of preference: guidance apart, then as many heads as divide, then the ring."""
    found = []
    for cfg in (2, 1):
        shards = gpus // cfg
        if gpus % cfg or shards > tokens:
            continue
        for ulysses in range(min(shards, config.num_heads), 0, -1):
            if shards % ulysses == 0 and (rings or ulysses == shards):
                found.append(Mesh(cfg, shards // ulysses, ulysses))
    # Among equals, heads that divide come before heads that do not.
    return sorted(found, key=lambda mesh: (-mesh.cfg, config.num_heads % mesh.ulysses != 0))


def shares_read(plan: Plan, config: DiTConfig, tokens: int) -> dict[float, float]:
    """For each share of the blocks of keys that `plan` reads, the share of the work of its forwards that does."""
    if plan.sparse is None or tokens < SMALL or not plan.forwards:  # of few tokens it saves no time
        return {1.0: 1.0}
    dense = min(1.0, plan.sparse.dense_layers / config.num_layers)
    found: dict[float, float] = {}
    for step in plan.steps:
        share = step.forwards / plan.forwards
        for read, part in ((1.0, dense), (1 - step.sparsity, 1 - dense)):
            found[read] = found.get(read, 0.0) + share * part
    return found


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
    """Of one branch on the shards of `mesh`, whose attention reads a share `read` of the blocks."""
    L, C, N, H, R, U = tokens, config.dim, config.ffn_dim, config.num_heads, mesh.ring, mesh.ulysses
    shard = -(-L // mesh.shards)
    channels = -(-H // U) * config.head_dim  # of the rank with the most heads, while it attends
    linears = 2 * shard * (6 * C * C + 2 * C * N) / (speeds.linears_fp8 if fp8_linears else speeds.linears)
    passes = speeds.passes * shard * C * BYTES / speeds.memory
    fp8_kernel = fp8_attention and (R == 1 or read == 1)
    one_round = 4 * (-(-L // R)) ** 2 * channels / (speeds.attention_fp8 if fp8_kernel else speeds.attention)
    if read < 1:
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
        if read < 1:  # means of keys and values and variances in float32, and the mean of each head's choice
            merge += 3 * 4 * (R - 1) * -(-L // (R * BLOCK)) * channels / link + 2 * speeds.latency
    attention = one_round + (R - 1) * max(one_round, hop) + merge
    block = linears + passes + exchange + attention
    if mesh.shards > 1:
        block = max(block, speeds.launch)
    return config.num_layers * block + speeds.ends * L * C

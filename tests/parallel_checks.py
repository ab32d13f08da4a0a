"""What ranks do in tests: each function runs on every rank of a world, see `parallel_ranks`."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests import control_references
from tests.animate_references import ANIMATE2, TINY_ANIMATE
from tests.exchanges import exchanges
from tests.s2v_references import S2V
from wan_core.checkpoint import load_dit, open_checkpoint
from wan_core.cli import build_parser
from wan_core.cli.generate import load_options_of, request_of
from wan_core.config import (
    LoadOptions,
    MagCacheOptions,
    Request,
    SkipOptions,
    SparseOptions,
)
from wan_core.execution.optimize import compile_blocks, optimize
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.protocol import Attention, AttentionCall
from wan_core.ops.attention.registry import BACKENDS
from wan_core.parallel.chords import BEGINNINGS, TimeStretch
from wan_core.parallel.conditioning import SplitBranches
from wan_core.parallel.mesh import Mesh, RankMesh, even_parts, gather_parts
from wan_core.parallel.sequence import ShardedAttention, ShardedTokens, check_lse, shard_lengths
from wan_core.parallel.weights import load_sharded_dit, shared_checkpoint
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.sources import TINY
from wan_core.sampling.cache.residual import ResidualCache
from wan_core.sampling.plan import make_plan
from wan_core.sampling.solvers import History
from wan_core.sampling.steps import Step
from wan_core.workers.rank import BetweenBlocks, Rank, agreements

CPU, TIMEOUT = torch.device("cpu"), timedelta(minutes=10)
Value = TypeVar("Value")
CAPTION = "a red circle moving right on a blue background"


@functools.cache
def ranks_of(mesh: str, device: str = "cpu") -> RankMesh:
    where = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else CPU
    if device == "cuda":
        torch.cuda.set_device(where)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT, device_id=where if device == "cuda" else None)
    return RankMesh.create(Mesh.parse(mesh), where, timeout=TIMEOUT)


def of_one(mesh: str, work: Callable[[], Value]) -> Value:
    """What one rank makes alone, known to all: they would make the same."""
    results = [work() if ranks_of(mesh).rank == 0 else None]
    dist.broadcast_object_list(results, 0)
    return cast(Value, results[0])


def places(mesh: str) -> tuple[int, ...]:
    ranks = ranks_of(mesh)
    return ranks.cfg.index, ranks.ring.index, ranks.ulysses.index, ranks.shard, ranks.host.size


def sharded_attention(ranks: RankMesh, backend: str, inside: Attention | None = None) -> ShardedAttention:
    """The attention of all ranks with a backend, or with `inside` in its place."""
    dense = BACKENDS[backend].load()
    check_lse(dense.gives_lse, backend, ranks.mesh)
    return ShardedAttention(ranks, dense if inside is None else inside, dense)


def shard_of(ranks: RankMesh, lengths: list[int]) -> slice:
    """This rank's tokens."""
    begin = sum(lengths[: ranks.shard])
    return slice(begin, begin + lengths[ranks.shard])


def group_lengths(sharded: ShardedAttention, call: AttentionCall) -> list[int]:
    """Tokens of every rank of a ring, each with all of its Ulysses group."""
    return list(sharded._ring(call, sharded.dense.with_lse).lengths)


@torch.no_grad()
def attention(mesh: str, heads: int, tokens: int, batch: int = 1, backend: str = "math", seed: int = 0) -> float:
    """The largest difference between sharded and whole attention of the same random numbers."""
    ranks = ranks_of(mesh)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, batch, tokens, heads, 8, generator=generator)
    lengths, _ = shard_lengths(tokens, 1, ranks.mesh.shards)
    mine = shard_of(ranks, lengths)
    sharded = sharded_attention(ranks, backend)
    out = sharded(q[:, mine], k[:, mine], v[:, mine], AttentionCall(lengths=lengths))
    whole = gather_parts(out, lengths, ranks.sequence, 1)
    return float((whole - BACKENDS["math"].load()(q, k, v)).abs().max())


@functools.lru_cache(maxsize=1)
def loaded(mesh: str | None, options: LoadOptions) -> Pipeline:
    """The models of the last question, which the next one of the same world and options uses again."""
    return Pipeline.load(options, ranks=None if mesh is None else ranks_of(mesh, options.device))


@torch.no_grad()
def trajectory(
    mesh: str | None, compile: str | None = None, decode: bool = True, **options
) -> tuple[Tensor, Tensor, dict]:
    """Latents and frames of the embedded model, and the report's settings. decode: most of the work; without it there
    are no frames."""
    request = dict(options.pop("request", {}))
    skip, sparse = request.pop("magcache", None), request.pop("sparse", None)
    request["skip"] = SkipOptions(
        magcache=None if skip is None else MagCacheOptions(**skip),
        sparse=None if sparse is None else SparseOptions(**sparse),
    )
    asked = Request(**{"prompt": CAPTION, "steps": 6, "seed": 3, **request})
    load_options = LoadOptions(**{"model": "tiny", "device": "cpu", **options})
    if decode or compile is not None or asked.image is not None:
        ranks = None if mesh is None else ranks_of(mesh, load_options.device)
        pipe = Pipeline.load(load_options, request=asked, ranks=ranks)
    else:
        pipe = loaded(mesh, load_options)
    if compile is not None:
        for name in ("high", "low"):
            compile_blocks(pipe.models.expert(name), CPU, compile)
    if decode:
        result = pipe.generate(asked)
        latents, frames = result.latents, torch.from_numpy(result.frames)
    else:
        run = pipe.prepare(asked)
        latents, frames = pipe.sample(run, pipe.encode(run)), torch.empty(0, dtype=torch.uint8)
    said = {**pipe.report.settings, "notes": pipe.report.notes, "held": list(pipe.models.residency.models)}
    return latents, frames, said


def held_blocks(mesh: str) -> list[int]:
    """The blocks of the high-noise expert whose weights this rank has."""
    load_options = LoadOptions(model="tiny", device="cpu")
    pipe = Pipeline.load(load_options, request=Request(prompt=CAPTION, steps=2), ranks=ranks_of(mesh, "cpu"))
    blocks = pipe.models.expert("high").blocks
    held_here = [i for i, block in enumerate(blocks) if not any(p.is_meta for p in block.parameters())]
    assert all(p.is_meta for i, block in enumerate(blocks) if i not in held_here for p in block.parameters())
    return held_here


def bent(x: Tensor, sigma: float) -> Tensor:
    """A velocity that is no straight line."""
    return torch.tanh(x * (1 + sigma)) - 0.3 * torch.cos(3 * x) * sigma


def chords(mesh: str, starts: tuple[int, ...], steps: int) -> tuple[Tensor, int]:
    """What ranks make of ten numbers in parallel steps that begin at `starts`, and how many steps this rank ran."""
    ranks = ranks_of(mesh)
    plan = make_plan(steps=steps, solver="euler")
    with mock.patch.dict(BEGINNINGS, {len(starts): tuple(start / steps for start in starts)}):
        stretch = TimeStretch(plan, ranks)
    x = stretch.begin(torch.linspace(-2, 2, 10))
    sigmas, past = (*stretch.plan.before, *stretch.plan.sigmas), len(stretch.plan.before)
    for step in stretch.plan.steps:
        x, _ = stretch.solver(x, bent(x, step.sigma), past + step.index, sigmas, History())
    return stretch.finish(x), len(stretch.plan.steps)


def weights(mesh: str) -> tuple[list[str], dict[str, int]]:
    """Names of tensors that a shared read changed, of all files of the embedded model; and bytes: those stored, and
    those that this rank took from a file."""
    ranks, changed = ranks_of(mesh), []
    counts = {"stored": 0, "touched": 0}
    for path in sorted(TINY.glob("*.safetensors")):
        plain = open_checkpoint(path)
        with CountedCopies(counts):
            shared = shared_checkpoint(plain, ranks)
            tensors = {name: shared.whole(name) for name in plain.tensors}
        for name, info in plain.tensors.items():
            stored, counts["stored"] = plain.read(name), counts["stored"] + info.nbytes
            if stored.dtype != tensors[name].dtype or not torch.equal(stored, tensors[name]):
                changed.append(f"{path.name} {name}")
    return changed, counts


class CountedCopies(TorchDispatchMode):
    """Counts the bytes that are copied: on a CPU, those that leave the mapping of a file."""

    def __init__(self, counts: dict[str, int]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            self.counts["touched"] += source.numel() * source.element_size()
        return func(*args, **(kwargs or {}))


def fails(mesh: str, rank: int, how: str) -> None:
    """Raise, die or hang on one rank, while the others wait for it."""
    if ranks_of(mesh).rank != rank:
        dist.barrier()
    elif how == "raise":
        raise ValueError("as a test wants it")
    elif how == "die":
        os._exit(3)
    else:
        time.sleep(60)


def relative(actual: Tensor, wanted: Tensor) -> float:
    return float((actual - wanted).abs().max() / wanted.abs().max())


@torch.no_grad()
def frames_with_own_timesteps(mesh: str, grid: tuple[int, int, int]) -> float:
    """A forward whose latent frames have a timestep each, as TI2V's first one has."""
    torch.manual_seed(0)
    narrow = {"in_channels": 4, "out_channels": 4, "text_dim": 8, "text_len": 6, "freq_dim": 16}
    config = DiTConfig(**narrow, dim=48, ffn_dim=64, num_heads=3, num_layers=2)
    model = WanModel(config).eval().requires_grad_(False)
    x, text = torch.randn(1, 4, grid[0], 2 * grid[1], 2 * grid[2]), torch.randn(1, 5, 8)
    times = torch.linspace(0, 900, grid[0])[None]
    optimize(model, attend=BACKENDS["sdpa"].load())
    whole = model(x, times, text)
    ranks = ranks_of(mesh)
    optimize(model, attend=BACKENDS["sdpa"].load(), ranks=ranks)
    return relative(model(x, times, text), whole)


@torch.no_grad()
def branches(mesh: str) -> list[list[int]]:
    """Which of this rank's forwards ran for both branches, for one, and what a rank that idles receives."""
    split = SplitBranches(ranks_of(mesh))
    ran: list[str] = []

    def forward(branch: str) -> Tensor:
        ran.append(branch)
        return torch.full((1, 2), 1.0 if branch == "cond" else 2.0)

    both = split(("cond", "uncond"), forward, (1, 2))
    one = split(("cond",), forward, (1, 2))
    assert list(both) == ["cond", "uncond"] and list(one) == ["cond"]
    return [ran, both["cond"].tolist(), both["uncond"].tolist(), one["cond"].tolist()]


@torch.no_grad()
def fp8_forward(mesh: str) -> tuple[float, float, float]:
    """Mean errors of one forward with FP8 attention against the exact one: whole, and sharded; and the difference of
    the two. The ranks' values differ by far, so that scales and means of their own would not fit together."""
    ranks = ranks_of(mesh)
    model = load_dit(TINY / "t2v_high.safetensors", dtype=torch.float32)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 16, 5, 12, 12, generator=generator)
    text = torch.randn(1, 9, model.config.text_dim, generator=generator)
    x[:, :, 2:] *= 30
    time = torch.tensor([700.0])
    attend = BACKENDS["math-fp8"].load()
    exact = optimize(model, attend=BACKENDS["math"].load())(x, time, text)
    whole = optimize(model, attend=attend)(x, time, text)
    optimize(model, attend=attend, ranks=ranks)
    sharded = model(x, time, text)
    return tuple(float((a - b).norm() / exact.norm()) for a, b in ((whole, exact), (sharded, exact), (sharded, whole)))


FAMILIES: dict[str, DiTConfig] = {
    "animate": TINY_ANIMATE, "animate2": ANIMATE2, "s2v": S2V, **control_references.CONFIGS
}  # fmt: skip


def sharded_weights(mesh: str) -> tuple[int, list[str]]:
    """Bytes of the blocks' weights that this rank holds in parts, and names of those whose parts are not the whole."""
    from torch.distributed.tensor import DTensor

    path = TINY / "t2v_high.safetensors"
    model, whole = load_sharded_dit(path, ranks_of(mesh), torch.float32), load_dit(path, dtype=torch.float32)
    wanted, local_bytes, changed = whole.state_dict(), 0, []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            local_bytes += parameter.to_local().numel() * parameter.element_size()
        full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if not torch.equal(full, wanted[name]) or isinstance(parameter, DTensor) != name.startswith("blocks."):
            changed.append(name)
    return local_bytes, changed


@torch.no_grad()
def traffic(mesh: str, heads: int, tokens: int) -> tuple[int, int]:
    """Bytes that this rank sends for one attention in float32, heads of 8: counted, and by the formula."""
    ranks, counts = ranks_of(mesh), {"bytes": 0}
    attend = sharded_attention(ranks, "math")
    lengths, _ = shard_lengths(tokens, 1, ranks.mesh.shards)
    call = AttentionCall(lengths=lengths)
    groups = group_lengths(attend, call)
    n, row = lengths[ranks.shard], groups[ranks.ring.index]
    mine = even_parts(heads, ranks.ulysses.size)[ranks.ulysses.index]
    with exchanges(counts):
        attend(*torch.randn(3, 1, n, heads, 8), call)
    ulysses = 3 * n * (heads - mine) + (row - n) * mine
    passed = [length for at, length in enumerate(groups) if at != (ranks.ring.index + 1) % ranks.ring.size]
    ring = 2 * mine * sum(passed) if ranks.ring.size > 1 else 0  # all parts but the one that the next rank has
    return counts["bytes"], 8 * 4 * (ulysses + ring)


@torch.no_grad()
def cached_tokens(mesh: str) -> tuple[int, int, bool]:
    """Tokens whose residual this rank keeps, those of its shard, and whether the chain is as before afterwards."""
    ranks = ranks_of(mesh)
    model = load_dit(TINY / "t2v_high.safetensors", dtype=torch.float32)
    optimize(model, attend=BACKENDS["sdpa"].load(), ranks=ranks)
    numbers = {"timestep": 500.0, "sigma": 0.5, "sigma_next": 0.4, "guidance": 1.0}
    first = Step(index=0, expert="high", branches=("cond",), **numbers)
    cache = ResidualCache([first, replace(first, index=1, action="reuse", skipped=("cond",))])
    with model.runners.adding(cache):
        model(torch.randn(1, 16, 5, 10, 14), torch.tensor([500.0]), torch.randn(1, 4, model.config.text_dim))
    lengths, _ = shard_lengths(5 * 5 * 7, 1, ranks.mesh.shards)
    runners_after = [type(runner) for runner in model.runners.runners]
    return cache.kept["cond"].buffer.shape[2], lengths[ranks.shard], runners_after == [ShardedTokens]


def questions(mesh: str, arguments: list[str]) -> tuple[list[int], int]:
    """How often this rank asks, in each step of a run of the embedded model by options of `generate`, whether to stop;
    and how often the plan says, with once at the end of each step."""
    command = [
        "generate",
        "--prompt",
        CAPTION,
        "--model",
        "tiny",
        "--device",
        "cpu",
        "--size",
        "48x32",
        "--frames",
        "17",
    ]
    options = build_parser().parse_args([*command, *arguments])
    asked = request_of(options)
    pipe = Pipeline.load(load_options_of(options), request=asked, ranks=ranks_of(mesh))
    run, counts = pipe.prepare(asked), [0]

    class Counting:
        def raise_if_interrupted(self) -> None:
            counts[-1] += 1

    due = agreements(run.job.plan, Mesh.parse(mesh), pipe.models.dit_config.num_layers)
    between = BetweenBlocks(cast(Rank, Counting()), due)

    def end(*_: object) -> None:
        between.end_step()
        counts.append(0)

    pipe.sample(run, pipe.encode(run), end, between)
    return [sum(counts)] if Mesh.parse(mesh).time > 1 else counts[:-1], sum(due)

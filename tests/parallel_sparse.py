"""What ranks do in tests of sparse attention: as `parallel_checks`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import torch
from parallel_checks import CPU, ranks_of, relative, shard_of, sharded_attention
from torch import Tensor

from tests.animate_references import draw_weights
from tests.exchanges import exchanges
from tests.s2v_references import S2V
from tests.s2v_references import draw_inputs as draw_sound
from wan_core.checkpoint import load_dit
from wan_core.checkpoint.random import random_module
from wan_core.config import (
    SparseOptions,
)
from wan_core.execution.optimize import optimize
from wan_core.models.wan.config import T2V_A14B
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import ForwardInfo
from wan_core.ops.attention.protocol import AttentionCall
from wan_core.ops.attention.registry import BACKENDS
from wan_core.ops.attention.sparse.forward import SparseAttention, SparseBehindFp8, SparseForward
from wan_core.ops.attention.sparse.kernels import KERNELS
from wan_core.ops.attention.sparse.routing import Rule
from wan_core.ops.attention.tiles import make_tiles
from wan_core.ops.kernels.formats import FP8, Quantized
from wan_core.parallel.mesh import gather_parts
from wan_core.parallel.sequence import shard_lengths
from wan_core.pipeline.settings import find_quantization
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles


@torch.no_grad()
def sparse_sound(mesh: str) -> tuple[float, float]:
    """The differences of one sparse forward of S2V: sharded and whole, sparse and dense."""
    model = load_dit(draw_weights(S2V), metadata={"num_heads": S2V.num_heads})
    inputs = draw_sound(S2V, (1, 3, 8, 9))
    x, time, context = (inputs.pop(name) for name in ("x", "timestep", "context"))
    attend, outputs = BACKENDS["math"].load(), []
    dense = optimize(model, attend=attend)(x, time, context, **inputs)
    for ranks in (None, ranks_of(mesh)):
        optimize(model, attend=attend, ranks=ranks)
        tiles = SparseTiles(model, SparseOptions(sparsity=0.7, kernel="math"), (3, 8, 9))
        with in_tiles(model, tiles):
            outputs.append(model(x, time, context, info=ForwardInfo(sparsity=0.7), **inputs))
    return relative(outputs[1], outputs[0]), relative(outputs[0], dense)


@torch.no_grad()
def sparse_attention(
    mesh: str,
    grid: tuple[int, int, int],
    block: int,
    keep: float = 0.25,
    heads: int = 3,
    fp8: bool = False,
    slope: bool = True,
) -> float:
    """The difference between sparse attention of all ranks and of one. Twice with other numbers. fp8: numbers that are
    exchanged in FP8; one rank has the same, widened."""
    ranks, tokens = ranks_of(mesh), grid[0] * grid[1] * grid[2]
    drawn = torch.randn(2, 3, 2, tokens, heads, 16, generator=torch.Generator().manual_seed(tokens))
    drawn[:, 1, :, : tokens // 3] *= 2  # the keys of some ranks stand out
    tiles, rule = make_tiles(grid, block, CPU), Rule(keep)
    state = SparseForward(KERNELS["math"], [], tiles, rule, slope=slope)
    inside = SparseBehindFp8() if fp8 else SparseAttention()
    sharded = sharded_attention(ranks, "math-fp8" if fp8 else "math", inside)
    lengths, _ = shard_lengths(tokens, 1, ranks.mesh.shards)
    alone, split = AttentionCall(0, state), AttentionCall(0, state, lengths)
    mine = shard_of(ranks, lengths)
    worst, unit = 0.0, torch.ones(1)
    for qkv in drawn:
        quantized = [Quantized(x.to(FP8), unit) for x in qkv]
        if fp8:
            whole = inside.quantized(*quantized, alone).data.float()
            out = sharded.quantized(*(Quantized(x.data[:, mine], unit) for x in quantized), split).data.float()
        else:
            whole = inside(*qkv, alone)
            out = sharded(*qkv[:, :, mine], split)
        gathered = gather_parts(out, lengths, ranks.sequence, 1)
        # FP8 may round the other way, which is a step of an eighth: the mean error tells more than the largest.
        error = (gathered - whole).norm() / whole.norm() if fp8 else (gathered - whole).abs().max()
        worst = max(worst, float(error))
    return worst


@torch.no_grad()
def sparse_forward(
    mesh: str,
    grid: tuple[int, int, int],
    attention: str,
    device: str = "cpu",
    precision: str = "fp32",
    kernel: str = "auto",
    compile: str = "off",
    apart: bool = False,
) -> tuple[float, float]:
    """Mean errors of one forward that reads half of the blocks, against the same in plain numbers on one rank: of one
    rank with the backend `attention`, and of all. Two blocks of random weights. apart: frames have a timestep each."""
    ranks = ranks_of(mesh, device)
    quantization = find_quantization(precision, ranks.device)
    config = replace(T2V_A14B, num_layers=2)
    if device == "cpu":
        config = replace(config, dim=64, ffn_dim=96, num_heads=4, text_dim=8, text_len=6, freq_dim=16)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    generator = torch.Generator(ranks.device).manual_seed(0)
    x = torch.randn(1, 16, grid[0], 2 * grid[1], 2 * grid[2], generator=generator, device=ranks.device)
    text = torch.randn(1, 5, config.text_dim, generator=generator, device=ranks.device).to(dtype)
    time = torch.linspace(0, 900, grid[0], device=ranks.device)[None] if apart else torch.tensor([700.0]).to(x.device)

    def run(model: WanModel, kernel: str) -> Tensor:
        options = SparseOptions(sparsity=0.5, ramp=0, kernel=kernel)
        with in_tiles(model, SparseTiles(model, options, grid)):
            return model(x, time, text, ForwardInfo(sparsity=0.5)).float()

    plain = random_module(config, device=ranks.device, dtype=dtype)
    exact = run(optimize(plain, attend=BACKENDS["sdpa"].load()), "auto")
    model = random_module(config, device=ranks.device, dtype=dtype, quantization=quantization)
    attend = BACKENDS[attention].load()
    whole = run(optimize(model, attend=attend, compile=compile), kernel)
    sharded = run(optimize(model, attend=attend, compile=compile, ranks=ranks), kernel)
    return tuple(float((output - exact).norm() / exact.norm()) for output in (whole, sharded))


@torch.no_grad()
def sparse_counts(mesh: str, attention: str, tokens: tuple[int, int, int]) -> dict[str, tuple[int, int, int]]:
    """What one forward of two blocks costs this rank, dense and sparse: bytes that it sends, how often blocks are
    chosen, and for how many rows (of all heads)."""
    ranks, measured = ranks_of(mesh), {}
    config = replace(T2V_A14B, num_layers=2, dim=64, ffn_dim=96, num_heads=4, text_dim=8, text_len=6, freq_dim=16)
    model = random_module(config, device=CPU, dtype=torch.float32)
    optimize(model, attend=BACKENDS[attention].load(), ranks=ranks)
    x, text = torch.randn(1, 16, tokens[0], 2 * tokens[1], 2 * tokens[2]), torch.randn(1, 5, config.text_dim)
    choose = SparseForward.route
    for name, sparsity in (("dense", 0.0), ("sparse", 0.5)):
        counts, rows = {"bytes": 0}, []

        def counted(*arguments, rows=rows):
            rows.append(arguments[1].shape[:3].numel())
            return choose(*arguments)

        tiles = SparseTiles(model, SparseOptions(sparsity=0.5, ramp=0), tokens)
        arranged = in_tiles(model, tiles) if sparsity else nullcontext()
        with arranged, exchanges(counts), mock.patch.object(SparseForward, "route", counted):
            model(x, torch.tensor([700.0]), text, ForwardInfo(sparsity=sparsity))
        measured[name] = counts["bytes"], len(rows), sum(rows)
    return measured | {"block": tiles.block}

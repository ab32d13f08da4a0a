"""S2V on a GPU: bf16 against float32 on the CPU, FP8 and sparse attention, seconds at 480p.

`python -m tests.models.test_gpu_s2v` prints a table of seconds and memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import wan_core
from tests.animate_references import draw_weights
from tests.models.test_gpu_animate import CUDA, seconds
from tests.s2v_references import S2V, draw_inputs
from wan_core.checkpoint.random import random_module
from wan_core.config import SparseOptions
from wan_core.execution.optimize import optimize
from wan_core.models.wan.families.s2v.data import S2V_14B
from wan_core.models.wan.runners import ForwardInfo
from wan_core.ops.attention.protocol import Attention
from wan_core.ops.attention.registry import resolve_attention
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles

pytestmark = pytest.mark.gpu
WIDE = replace(S2V, dim=256, num_heads=2)  # head dim 128, as kernels want it
GRIDS = ((1, 3, 8, 12), (1, 3, 7, 9))


def backend(attention: str) -> Attention:
    try:
        return resolve_attention(attention, CUDA, torch.bfloat16, 128)[1]
    except ValueError as fault:
        pytest.skip(str(fault))


@torch.no_grad()
@pytest.mark.parametrize("attention", ["auto", "te-fp8", "cudnn-fp8"])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_gpu_computes_what_a_cpu_computes(grid, attention):
    weights, given = draw_weights(WIDE), draw_inputs(WIDE, grid)
    x, timestep, context = (given.pop(name) for name in ("x", "timestep", "context"))
    exact = wan_core.load_dit(weights)(x, timestep, context, **given)
    model = optimize(wan_core.load_dit(weights, device=CUDA, dtype=torch.bfloat16), attend=backend(attention))
    on_gpu = {name: value.to(CUDA) for name, value in given.items()}
    found = model(x.to(CUDA), timestep.to(CUDA), context.to(CUDA), **on_gpu).cpu()
    assert (found - exact).norm() / exact.norm() < (0.05 if attention == "auto" else 0.12)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["auto", "te-fp8", "cudnn-fp8"])
def test_sparse_attention_that_reads_everything_is_dense(attention):
    """Tokens beside the video's are read whole by FP8 backends, too."""
    given = {name: value.to(CUDA) for name, value in draw_inputs(WIDE, GRIDS[0]).items()}
    x, timestep, context = (given.pop(name) for name in ("x", "timestep", "context"))
    model = wan_core.load_dit(draw_weights(WIDE), device=CUDA, dtype=torch.bfloat16)
    prepared = optimize(model, attend=backend(attention), graphs=False).prepare_text(context, **given)
    dense = model(x, timestep, prepared)
    for sparsity, limit in ((0.001, 0.05), (0.5, 0.4)):
        with in_tiles(model, SparseTiles(model, SparseOptions(sparsity=sparsity, ramp=0), None, GRIDS[0][1:])):
            found = model(x, timestep, prepared, ForwardInfo(sparsity=sparsity))
        assert (found - dense).norm() / dense.norm() < limit


@torch.no_grad()
def measure(attention: str, latents: tuple[int, int, int]) -> str:
    """A row of the table, for latents of so many frames, rows and columns."""
    T, Y, X = latents
    model = random_module(replace(S2V_14B, num_layers=5, injectors=2), device=CUDA, dtype=torch.bfloat16)
    optimize(model, attend=backend(attention), graphs=False)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(1, *shape, device=CUDA)

    x, timestep, context = draw(16, T, Y, X), torch.tensor([700.0], device=CUDA), draw(512, 4096)
    given = {"audio": draw(25, 1024, 4 * T), "reference": draw(16, 1, Y, X), "pose": draw(16, T, Y, X)}
    plain = model.prepare_text(context)
    prepared = model.prepare_text(context, **given, motion=draw(16, 19, Y, X))
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    row = {
        "prepare": seconds(lambda: model.prepare_text(context, **given), 1),
        "video alone": seconds(lambda: model(x, timestep, plain)),
        "all inputs": seconds(lambda: model(x, timestep, prepared)),
    }
    with in_tiles(model, SparseTiles(model, SparseOptions(sparsity=0.8, ramp=0), None, (T, Y // 2, X // 2))):
        row["sparse 0.8"] = seconds(lambda: model(x, timestep, prepared, ForwardInfo(sparsity=0.8)))
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30
    words = "  ".join(f"{name} {value:.3f}" for name, value in row.items())
    return f"{attention:10s} {latents} {words}  beside {peak:.2f} GiB"


if __name__ == "__main__":
    print("5 of 40 blocks, 2 of 12 injectors, bf16 linears, 77 frames; seconds of one forward")
    for size in ((20, 60, 104), (20, 80, 80), (20, 62, 106)):  # the last has groups that share a small divisor
        for name in ("auto", "cudnn-fp8"):
            print(measure(name, size), flush=True)

"""Animate and Animate-2 on a GPU: bf16 against float32 on the CPU, FP8 and sparse attention, seconds at 480p.

`python -m tests.models.test_gpu_animate` prints a table of seconds and memory.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

import wan_core
from tests.animate_references import ANIMATE2, TINY_ANIMATE, draw_inputs, draw_weights
from wan_core.checkpoint.random import random_module
from wan_core.config import SparseOptions
from wan_core.execution.optimize import optimize
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.animate.data import ANIMATE_14B
from wan_core.models.wan.families.animate.model import AnimateModel
from wan_core.models.wan.families.animate2 import model as animate2_model
from wan_core.models.wan.families.animate2.data import ANIMATE2_14B, Form
from wan_core.models.wan.families.animate2.model import Animate2Model
from wan_core.models.wan.runners import ForwardInfo
from wan_core.ops.attention.registry import resolve_attention
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
# Head dim 128, as kernels want it.
WIDE = {
    "animate": replace(TINY_ANIMATE, dim=256, num_heads=2),
    "animate2": replace(ANIMATE2, dim=256, num_heads=2),
}
GRID = (1, 3, 8, 12)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["auto", "te-fp8", "cudnn-fp8"])
@pytest.mark.parametrize("family", WIDE)
def test_a_gpu_computes_what_a_cpu_computes(family, attention):
    config = WIDE[family]
    weights, given = draw_weights(config), draw_inputs(config, GRID)
    x, timestep, context = (given.pop(name) for name in ("x", "timestep", "context"))
    extra = {"log_scale": -1.3} if family == "animate2" else {}
    exact = wan_core.load_dit(weights, family=family)(x, timestep, context, **given, **extra)
    try:
        _, attend = resolve_attention(attention, CUDA, torch.bfloat16, config.head_dim)
    except ValueError as fault:
        pytest.skip(str(fault))
    model = optimize(wan_core.load_dit(weights, family=family, device=CUDA, dtype=torch.bfloat16), attend=attend)
    on_gpu = {name: value.to(CUDA) for name, value in given.items()}
    found = model(x.to(CUDA), timestep.to(CUDA), context.to(CUDA), **on_gpu, **extra).cpu()
    assert (found - exact).norm() / exact.norm() < (0.05 if attention == "auto" else 0.12)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["auto", "te-fp8"])
@pytest.mark.parametrize("family", WIDE)
def test_sparse_attention_that_reads_everything_is_dense(family, attention):
    """Through the kernels of a GPU, their log-sum-exp included."""
    config = WIDE[family]
    given = {name: value.to(CUDA) for name, value in draw_inputs(config, GRID).items()}
    x, timestep, context = (given.pop(name) for name in ("x", "timestep", "context"))
    try:
        _, attend = resolve_attention(attention, CUDA, torch.bfloat16, config.head_dim)
    except ValueError as fault:
        pytest.skip(str(fault))
    model = wan_core.load_dit(draw_weights(config), family=family, device=CUDA, dtype=torch.bfloat16)
    prepared = optimize(model, attend=attend, graphs=False).prepare_text(context, **given)
    dense = model(x, timestep, prepared)
    for sparsity, limit in ((0.001, 0.05), (0.5, 0.4)):
        tiles = SparseTiles(model, SparseOptions(sparsity=sparsity, ramp=0), None, GRID[1:])
        with in_tiles(model, tiles):
            found = model(x, timestep, prepared, ForwardInfo(sparsity=sparsity))
        assert (found - dense).norm() / dense.norm() < limit


@torch.no_grad()
@pytest.mark.parametrize("family", WIDE)
def test_replayed_it_is_the_same(family):
    """As CUDA graphs, both branches together, of which one leaves a block out."""
    config = WIDE[family]
    if family == "animate2":
        config = replace(config, unconditional_skips=1)
    given = {name: value.to(CUDA) for name, value in draw_inputs(config, GRID).items()}
    x, timestep, context = (given.pop(name) for name in ("x", "timestep", "context"))
    x, timestep, context = (torch.cat([one, one]) for one in (x, timestep, context))
    given["image"] = torch.cat([given["image"]] * 2)
    branches = {"unconditional": [False, True]} if family == "animate2" else {}
    model = AnimateModel(config) if family == "animate" else Animate2Model(config)
    model.load_state_dict(draw_weights(config))
    optimize(
        model.to(CUDA, torch.bfloat16).requires_grad_(False), attend=resolve_attention("auto", CUDA, torch.bfloat16)[1]
    )
    prepared = model.prepare_text(context, **given, **branches)
    first = model(x, timestep, prepared)
    for _ in range(4):
        assert torch.equal(model(x, timestep, prepared), first)


@torch.no_grad()
def test_from_host_memory_it_is_the_same(monkeypatch):
    """Keys and values of the driving video that are copied while the layer before computes."""
    config = WIDE["animate2"]
    given = {name: value.to(CUDA) for name, value in draw_inputs(config, (1, 5, 24, 24)).items()}
    x, timestep, context = (given.pop(name) for name in ("x", "timestep", "context"))
    model = wan_core.load_dit(draw_weights(config), family="animate2", device=CUDA, dtype=torch.bfloat16)
    there = model(x, timestep, model.prepare_text(context, **given))
    monkeypatch.setattr(animate2_model, "choose_form", lambda *_: Form(on_host=True))
    prepared = model.prepare_text(context, **given)
    for _ in range(20):
        assert torch.equal(model(x, timestep, prepared), there)
    del prepared
    assert torch.equal(model(x, timestep, model.prepare_text(context, **given)), there)


@torch.no_grad()
def test_in_fp8_it_is_almost_the_same_and_no_place_changes_it(monkeypatch):
    config = WIDE["animate2"]
    given = {name: value.to(CUDA) for name, value in draw_inputs(config, (1, 5, 24, 24)).items()}
    x, timestep, context = (given.pop(name) for name in ("x", "timestep", "context"))
    model = wan_core.load_dit(draw_weights(config), family="animate2", device=CUDA, dtype=torch.bfloat16)
    exact = model(x, timestep, model.prepare_text(context, **given))
    found = []
    for on_host in (False, True):
        monkeypatch.setattr(animate2_model, "choose_form", lambda *_, h=on_host: Form(on_host=h, fp8=True))
        prepared = model.prepare_text(context, **given)
        found += [model(x, timestep, prepared) for _ in range(5)]
    assert all(torch.equal(one, found[0]) for one in found)
    assert 0 < (found[0] - exact).norm() / exact.norm() < 0.02


def seconds(run, times: int = 3) -> float:
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


@torch.no_grad()
def measure(config: DiTConfig, attention: str, latents: tuple[int, int, int]) -> str:
    """A row of the table, for latents of so many frames, rows and columns."""
    T, Y, X = latents
    model = random_module(config, device=CUDA, dtype=torch.bfloat16)
    optimize(model, attend=resolve_attention(attention, CUDA, torch.bfloat16, 128)[1], graphs=False)
    x, timestep = torch.randn(1, 36, T, Y, X, device=CUDA), torch.tensor([700.0], device=CUDA)
    context, image = torch.randn(1, 512, 4096, device=CUDA), torch.randn(1, 257, 1280, device=CUDA)
    given = {"image": image, "pose": torch.randn(1, 36, T - 1, Y, X, device=CUDA)}
    if config.family == "animate":
        given["pose"] = given["pose"][:, :16]
        given["face"] = torch.rand(1, 3, 4 * (T - 1) - 3, 512, 512, device=CUDA) * 2 - 1
    plain, prepared = model.prepare_text(context, image), model.prepare_text(context, **given)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    row = {
        "prepare": seconds(lambda: model.prepare_text(context, **given), 1),
        "undriven": seconds(lambda: model(x, timestep, plain)),
        "driven": seconds(lambda: model(x, timestep, prepared)),
    }
    tiles = SparseTiles(model, SparseOptions(sparsity=0.8, ramp=0), None, (T, Y // 2, X // 2))
    with in_tiles(model, tiles):
        row["sparse 0.8"] = seconds(lambda: model(x, timestep, prepared, ForwardInfo(sparsity=0.8)))
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30
    words = "  ".join(f"{name} {value:.3f}" for name, value in row.items())
    return f"{config.family:9s} {attention:10s} {words}  beside {peak:.2f} GiB"


if __name__ == "__main__":
    print("4 of 40 blocks, bf16 linears, 832x480, 81 frames; seconds of one forward")
    for one in (ANIMATE2_14B, ANIMATE_14B):
        for name in ("auto", "cudnn-fp8"):
            print(measure(replace(one, num_layers=4), name, (22, 60, 104)), flush=True)

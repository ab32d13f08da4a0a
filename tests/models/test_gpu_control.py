"""VACE and Fun on a GPU: bf16 and FP8 against float32 on the CPU, sparse attention, CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import wan_core
from tests.animate_references import draw_weights
from tests.control_references import CONFIGS, contexts, draw_inputs
from wan_core.config import SparseOptions
from wan_core.execution.optimize import optimize
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import ForwardInfo
from wan_core.ops.attention.registry import resolve_attention
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
WIDE = {name: replace(config, dim=256) for name, config in CONFIGS.items()}  # head dim 128, as kernels want it
GRID = (1, 3, 8, 12)


def drawn(config: DiTConfig, device: torch.device) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """x, timestep and context, and the inputs by name; two control videos."""
    given = draw_inputs(config, GRID)
    if "control" in given:
        given |= {"control": contexts(given["control"]), "control_scale": torch.tensor([0.7, 1.6])}
    given = {name: value.to(device) for name, value in given.items()}
    return [given.pop(name) for name in ("x", "timestep", "context")], given


def on_gpu(config: DiTConfig, attention: str, **options) -> WanModel:
    try:
        _, attend = resolve_attention(attention, CUDA, torch.bfloat16, config.head_dim)
    except ValueError as fault:
        pytest.skip(str(fault))
    model = wan_core.load_dit(draw_weights(config), device=CUDA, dtype=torch.bfloat16)
    return optimize(model, attend=attend, **options)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["auto", "te-fp8", "cudnn-fp8"])
@pytest.mark.parametrize("name", WIDE)
def test_a_gpu_computes_what_a_cpu_computes(name, attention):
    config = WIDE[name]
    first, given = drawn(config, torch.device("cpu"))
    exact = wan_core.load_dit(draw_weights(config))(*first, **given)
    model = on_gpu(config, attention)
    first, given = drawn(config, CUDA)
    found = model(*first, **given).cpu()
    assert (found - exact).norm() / exact.norm() < (0.05 if attention == "auto" else 0.12)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["auto", "te-fp8"])
@pytest.mark.parametrize("name", WIDE)
def test_sparse_attention_that_reads_everything_is_dense(name, attention):
    model = on_gpu(WIDE[name], attention, graphs=False)
    (x, timestep, context), given = drawn(WIDE[name], CUDA)
    prepared = model.prepare_text(context, **given)
    dense = model(x, timestep, prepared)
    for sparsity, limit in ((0.001, 0.05), (0.5, 0.4)):
        tiles = SparseTiles(model, SparseOptions(sparsity=sparsity, ramp=0), None, GRID[1:])
        with in_tiles(model, tiles):
            found = model(x, timestep, prepared, ForwardInfo(sparsity=sparsity))
        assert (found - dense).norm() / dense.norm() < limit


@torch.no_grad()
@pytest.mark.parametrize("name", WIDE)
def test_replayed_it_is_the_same(name):
    """As CUDA graphs; another control after it is not the first one's."""
    model = on_gpu(WIDE[name], "auto")
    (x, timestep, context), given = drawn(WIDE[name], CUDA)
    found = []
    for inputs in (given, {key: -value for key, value in given.items()}):
        prepared = model.prepare_text(context, **inputs)
        found.append(model(x, timestep, prepared))
        for _ in range(4):
            assert torch.equal(model(x, timestep, prepared), found[-1])
    assert (found[0] - found[1]).norm() / found[0].norm() > 1e-3

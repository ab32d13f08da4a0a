"""Families with inputs beside the text on a GPU: bf16 against float32 on the CPU, FP8 and sparse attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import wan_core
from tests.animate_references import draw_weights
from tests.control_references import contexts
from tests.family_models import CONFIGS, draw_inputs
from wan_core.config import SparseOptions
from wan_core.execution.optimize import optimize
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import family_of
from wan_core.models.wan.families.animate2 import Animate2Config, Form
from wan_core.models.wan.families.animate2 import model as animate2_model
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import ForwardInfo
from wan_core.ops.attention.registry import resolve_attention
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
WIDE = {name: replace(config, dim=256, num_heads=2) for name, config in CONFIGS.items()}  # head dim 128, for kernels
EVERY = pytest.mark.parametrize("name", WIDE)
GRID = (1, 3, 8, 12)


def on_gpu(config: DiTConfig, attention: str, **options: Any) -> WanModel:
    try:
        needs_lse = config.merges_attention
        _, attend = resolve_attention(attention, CUDA, torch.bfloat16, config.head_dim, needs_lse=needs_lse)
    except ValueError as fault:
        pytest.skip(str(fault))
    model = wan_core.load_dit(draw_weights(config), family=config.family, device=CUDA, dtype=torch.bfloat16)
    return optimize(model, attend=attend, **options)


def drawn(config: DiTConfig, device: torch.device, grid=GRID) -> tuple[list[Tensor], dict[str, Any]]:
    """x, timestep and context, and the inputs by name; two control videos."""
    inputs = draw_inputs(config, grid)
    if "control" in inputs:
        inputs |= {"control": contexts(inputs["control"]), "control_scale": torch.tensor([0.7, 1.6])}
    inputs = {name: value.to(device) for name, value in inputs.items()}
    return [inputs.pop(name) for name in ("x", "timestep", "context")], inputs


def difference(actual: Tensor, exact: Tensor) -> float:
    return float((actual - exact).norm() / exact.norm())


@torch.no_grad()
@pytest.mark.parametrize("attention", ["auto", "cudnn-fp8"])
@EVERY
def test_a_gpu_computes_what_a_cpu_computes(name, attention):
    config = WIDE[name]
    model = on_gpu(config, attention)
    extra = {"log_scale": -1.3} if name == "animate2" else {}
    for grid in (GRID, (1, 3, 7, 9))[: 2 if name == "s2v" else 1]:  # the tokens of S2V depend on odd sizes
        first, inputs = drawn(config, torch.device("cpu"), grid)
        exact = wan_core.load_dit(draw_weights(config), family=config.family)(*first, **inputs, **extra)
        first, inputs = drawn(config, CUDA, grid)
        output = model(*first, **inputs, **extra).cpu()
        assert difference(output, exact) < (0.05 if attention == "auto" else 0.12)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["auto", "cudnn-fp8"])
@EVERY
def test_sparse_attention_that_reads_everything_is_dense(name, attention):
    """Through the kernels of a GPU, their log-sum-exp included."""
    model = on_gpu(WIDE[name], attention)
    (x, timestep, context), inputs = drawn(WIDE[name], CUDA)
    prepared = model.prepare_text(context, **inputs)
    dense = model(x, timestep, prepared)
    for sparsity, limit in ((0.001, 0.05), (0.5, 0.4)):
        with in_tiles(model, SparseTiles(model, SparseOptions(sparsity=sparsity, ramp=0), GRID[1:])):
            assert difference(model(x, timestep, prepared, ForwardInfo(sparsity=sparsity)), dense) < limit


@torch.no_grad()
@EVERY
def test_again_it_is_the_same(name):
    """Other inputs after the first ones are not the first ones. Animate-2: both branches, of which one leaves a block
    out, together."""

    config, model = WIDE[name], None
    (x, timestep, context), drawn_inputs = drawn(config, CUDA)
    if isinstance(config, Animate2Config):
        config = replace(config, unconditional_skips=1)
        x, timestep, context, drawn_inputs["image"] = (
            torch.cat([one, one]) for one in (x, timestep, context, drawn_inputs["image"])
        )
        model = family_of(config).model_class(config)(config)
        model.load_state_dict(draw_weights(config))
        attend = resolve_attention("auto", CUDA, torch.bfloat16)[1]
        model = optimize(model.to(CUDA, torch.bfloat16).requires_grad_(False), attend=attend)
    branches = {} if model is None else {"unconditional": [False, True]}
    model = model or on_gpu(config, "auto")
    outputs = []
    for inputs in (drawn_inputs, {key: -value for key, value in drawn_inputs.items()}):
        prepared = model.prepare_text(context, **inputs, **branches)
        outputs.append(model(x, timestep, prepared))
        for _ in range(4):
            assert torch.equal(model(x, timestep, prepared), outputs[-1])
    assert difference(outputs[1], outputs[0]) > 1e-3


@torch.no_grad()
def test_a_driving_video_in_host_memory_or_in_fp8_is_the_same(monkeypatch):
    """Animate-2's keys and values, which are copied while the layer before computes."""
    model = on_gpu(WIDE["animate2"], "auto")  # which no stream may copy into
    (x, timestep, context), inputs = drawn(WIDE["animate2"], CUDA, (1, 5, 24, 24))

    def repeated(form: Form, times: int) -> list[Tensor]:
        monkeypatch.setattr(animate2_model, "choose_form", lambda *_: form)
        prepared = model.prepare_text(context, **inputs)
        return [model(x, timestep, prepared) for _ in range(times)]

    exact = repeated(Form(), 1)[0]
    assert all(torch.equal(one, exact) for _ in range(2) for one in repeated(Form(on_host=True), 10))
    rounded = repeated(Form(fp8=True), 5) + repeated(Form(on_host=True, fp8=True), 5)
    assert all(torch.equal(one, rounded[0]) for one in rounded)
    assert 0 < difference(rounded[0], exact) < 0.02

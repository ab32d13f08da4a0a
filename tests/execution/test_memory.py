"""The memory plan: what fits is chosen, what was measured is said, and the command line prints one table."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan_core.checkpoint.detect import empty_module
from wan_core.execution.memory.host_weights import tensors_of
from wan_core.execution.memory.planning import (
    FACTORS,
    GIB,
    Sizes,
    beside_weights,
    limited,
    plan_memory,
    unit_bytes,
    vae_bytes,
)
from wan_core.execution.memory.residency import Residency
from wan_core.execution.memory.streaming import Stage, stage_bytes
from wan_core.models.vae.config import VAE_21, VAE_22
from wan_core.models.wan.config import T2V_A14B, DiTConfig
from wan_core.ops.quant.fp8 import Fp8RowLinear
from wan_core.ops.quant.swap import swap_linears

SHAPE_720P, SHAPE_480P = (1, 16, 21, 90, 160), (1, 16, 21, 60, 104)
TEXT, VAE = 11_361_000_000, 254_000_000  # bytes in bf16


def a14b(fp8: bool) -> Sizes:
    return Sizes(units=unit_bytes(T2V_A14B, 2, fp8), experts=2, text_encoder=TEXT, vae=VAE)


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("quantized", [False, True])
def test_sizes_are_those_of_the_module(quantized, keep):
    config = DiTConfig(
        in_channels=36, out_channels=16, dim=256, ffn_dim=768, num_heads=4, num_layers=4, text_dim=64, text_len=16
    )
    module = empty_module(config)
    if quantized:
        swap_linears(module, Fp8RowLinear, config.quantized_names(keep), torch.bfloat16)
    bytes_of_unit = dict.fromkeys(range(5), 0)
    for name, tensor in tensors_of(module).items():
        unit = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0
        bytes_of_unit[unit] += tensor.numel() * (
            2 if tensor.dtype == torch.float32 and "scale" not in name else tensor.itemsize
        )
    assert unit_bytes(config, 2, quantized, keep) == tuple(bytes_of_unit.values())


def test_the_plan_says_what_was_measured_on_an_h200():
    """benchmarks/results: switch (720p FP8, everything resident) 42.54 GiB; generate (480p bf16) denoise 67.92, decode
    67.35; single (720p, one prompt) activations 4.034 GiB; VAE 2.1 at 720p 7.5, VAE 2.2 6.5."""
    activations = beside_weights(T2V_A14B, VAE_21, SHAPE_720P, per_token=FACTORS["fused"])
    plan = plan_memory(a14b(fp8=True), activations, 139 << 30)
    phases = {phase.name: phase.total / GIB for phase in plan.phases}
    assert plan.policy == "resident" and phases["denoise"] == pytest.approx(42.54, rel=0.01)
    small = beside_weights(T2V_A14B, VAE_21, SHAPE_480P, per_token=FACTORS["fused"])
    phases = {p.name: p.total / GIB for p in plan_memory(a14b(fp8=False), small, 139 << 30).phases}
    assert phases["denoise"] == pytest.approx(67.92, rel=0.05) and phases["decode"] == pytest.approx(67.35, rel=0.05)
    assert vae_bytes(VAE_21, 90, 160) / GIB == pytest.approx(7.5, rel=0.05)
    assert vae_bytes(VAE_22, 44, 80) / GIB == pytest.approx(6.5, rel=0.05)
    assert vae_bytes(VAE_21, 90, 160, itemsize=4) == pytest.approx(2 * vae_bytes(VAE_21, 90, 160), rel=1e-6)


@given(
    gib=st.floats(4, 160),
    fp8=st.booleans(),
    shape=st.sampled_from([SHAPE_720P, SHAPE_480P]),
    batched=st.booleans(),
    residuals=st.integers(0, 4 << 30),
)
def test_what_is_chosen_fits_and_nothing_better_would(gib, fp8, shape, batched, residuals):
    sizes = a14b(fp8)
    activations = beside_weights(
        T2V_A14B, VAE_21, shape, per_token=FACTORS["fused"], batched=batched, residuals=residuals
    )
    plan = plan_memory(sizes, activations, limited(gib))
    denoise = next(phase for phase in plan.phases if phase.name == "denoise")
    if plan.policy == "resident":
        assert plan.fits and denoise.weights == sizes.all and plan.host == 0
        return
    assert sizes.all + activations.most > plan.room  # all of it would not fit
    assert plan.host == sizes.all
    if plan.policy == "swap":
        assert sizes.expert + activations.denoise <= plan.room
        return
    assert sizes.expert + activations.denoise > plan.room  # nor would a whole expert
    resident_bytes = stage_bytes(list(sizes.units), plan.resident_blocks)
    assert plan.resident_blocks == 0 or resident_bytes + activations.denoise <= plan.room
    if plan.resident_blocks < plan.blocks - 3:
        assert stage_bytes(list(sizes.units), plan.resident_blocks + 1) + activations.denoise > plan.room


@pytest.mark.parametrize("resident", [None, 0, 2, 5])
def test_a_stage_takes_the_bytes_that_were_planned(resident):
    config = DiTConfig(
        in_channels=16, out_channels=16, dim=64, ffn_dim=128, num_heads=2, num_layers=5, text_dim=32, text_len=8
    )
    model = empty_module(config).to_empty(device="cpu")
    residency = Residency(torch.device("cpu"), "swap" if resident is None else "stream", resident_blocks=resident or 0)
    residency.add("high", model)
    stage = Stage(torch.device("cpu"), resident)
    shelf = residency.host_weights["high"]
    stage.use(shelf)
    assert stage.held == stage.nbytes(shelf) == stage_bytes([u.layout.nbytes for u in shelf.units], resident)
    stage.leave_device()
    assert stage.held == 0 and stage.is_empty

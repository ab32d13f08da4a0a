"""VACE and Fun through the denoising loop, with everything that makes it fast: each equals the plain run."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.control_references import CONFIGS, contexts, draw_inputs
from tests.denoised import denoise
from tests.sampling.family_runs import GRIDS, conditioned, difference, plan_for, prepared_model, run
from wan_core.config import SparseOptions
from wan_core.execution.memory.host_weights import ALIGNMENT, HostWeights
from wan_core.execution.memory.planning import beside_weights, unit_bytes
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.config import T2V_A14B, DiTConfig
from wan_core.models.wan.families.fun import CAMERA_A14B, CONTROL_A14B
from wan_core.models.wan.families.plain import fields_of
from wan_core.models.wan.families.vace import VACE_14B
from wan_core.models.wan.runners import ForwardInfo
from wan_core.ops.attention.sparse.forward import SparseForward
from wan_core.pipeline.model_parts import matrix_parameters
from wan_core.sampling.plan import make_plan
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles
from wan_core.sampling.sparsity.schedule import sparsify


@pytest.fixture(params=CONFIGS)
def name(request) -> str:
    return request.param


def test_two_experts_each_prepare_their_own(name):
    """Neither expert of A14B sees what the other made of the control."""
    experts = {"high": prepared_model(name), "low": prepared_model(name, 7)}
    plan = make_plan(task="t2v-A14B", steps=4, guidance_high=2.0, guidance_low=2.0)
    assert len(plan.phases) == 2
    latents = run(experts, name, plan)
    assert all(difference(run(model, name, plan), latents) > 1e-3 for model in experts.values())
    assert torch.equal(run(experts, name, plan), latents)


def test_vace_blocks_choose_for_themselves():
    """Each of 4 blocks, and each of 2 VACE blocks for each of 2 control videos, makes a choice of its own."""
    model, drawn = prepared_model("vace"), draw_inputs(CONFIGS["vace"], (1, *GRIDS["vace"]))
    options = sparsify(plan_for("vace"), SparseOptions.parse("0.9:ramp0")).sparse
    assert options is not None
    choose, routes = SparseForward.route, []
    noted = mock.patch.object(SparseForward, "route", lambda *of: routes.append(choose(*of)) or routes[-1])
    with torch.no_grad(), noted, in_tiles(model, SparseTiles(model, options, GRIDS["vace"])):
        control = contexts(drawn["control"])
        model(drawn["x"], drawn["timestep"], drawn["context"], ForwardInfo(sparsity=0.9), control=control)
    assert len(routes) == 4 + 2 * 2
    assert not torch.equal(routes[0].kept(routes[0].blocks.shape[2]), routes[1].kept(routes[1].blocks.shape[2]))


# --------------------------------------------------------------------------------------------------------------- memory


def test_vace_blocks_stream_with_the_block_beside_them():
    model = prepared_model("vace")
    weights = HostWeights(model, lock=False)
    wanted = unit_bytes(model.config, 4, False)
    for unit, nbytes in zip(weights.units, wanted, strict=True):
        assert 0 <= unit.layout.nbytes - nbytes < ALIGNMENT * len(unit.tensors)
    assert wanted[1] > wanted[3] > 1.8 * wanted[2]  # with a VACE block, and the first one's projection; without
    assert not any(name.startswith("vace_blocks") for name in names_of_rest(weights))


def names_of_rest(weights: HostWeights) -> list[str]:
    kept_ids = {id(tensor) for tensor in weights.units[0].tensors}
    return [name for name, tensor in weights.model.named_parameters() if id(tensor) in kept_ids]


def test_vace_blocks_are_quantised():
    names = VACE_14B.quantized_names()
    assert len(names) == 48 * 10 and len(VACE_14B.quantized_names(keep_blocks=1)) == 45 * 10
    whole, encoded = (sum(unit_bytes(VACE_14B, 2, quantized)) for quantized in (False, True))
    assert abs((whole - encoded) - matrix_parameters(VACE_14B)) < 1e-3 * whole
    assert whole - sum(unit_bytes(T2V_A14B, 2, False)) > 8 * 2 * matrix_parameters(T2V_A14B) / 40


@pytest.mark.parametrize("config", [VACE_14B, CONTROL_A14B, CAMERA_A14B])
def test_the_memory_plan_counts_what_is_prepared(config):
    """Text of the VACE blocks, the control video and its chain; tokens of the camera; a frame of the reference."""
    latents = (1, 16, 21, 60, 104)
    prompts, without = (
        beside_weights(one, VAE_21, latents, per_token=5.0).prompts for one in (config, DiTConfig(**fields_of(config)))
    )
    tokens = 2 * config.dim * {VACE_14B: 2 * 32760, CONTROL_A14B: 1560, CAMERA_A14B: 32760}[config]
    assert tokens <= prompts - without < 2**31


def test_strengths_of_the_plan_are_those_of_the_control():
    """0 in every step is no control, 1 is none said, and a number counts as the scale of the conditioning does."""
    model, plan = prepared_model("vace"), plan_for("vace")

    def with_strength(*control: float) -> torch.Tensor:
        return run(model, "vace", replace(plan, steps=tuple(replace(s, control=control) for s in plan.steps)))

    conditioning = conditioned("vace")
    noise = torch.randn(1, 16, 3, 8, 10, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        free = denoise(plan, lambda _: model, replace(conditioning, inputs={}), noise)
        half = {**conditioning.inputs, "control_scale": conditioning.inputs["control_scale"] / 2}
        halved = denoise(plan, lambda _: model, replace(conditioning, inputs=half), noise)
    assert torch.equal(with_strength(0.0), free) and torch.equal(with_strength(1.0), run(model, "vace"))
    assert difference(with_strength(0.5), halved) < 1e-5 and difference(halved, free) > 1e-4
    assert difference(with_strength(0.0, 1.0), with_strength(1.0, 0.0)) > 1e-4

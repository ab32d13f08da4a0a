"""VACE and Fun through the denoising loop, with everything that makes it fast: each equals the plain run."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import wan_core
from tests.animate_references import draw_weights
from tests.control_references import CONFIGS, OWN, contexts, draw_inputs
from tests.denoised import denoise
from wan_core.config import SkipOptions, TaylorSeerOptions
from wan_core.execution.memory.host_weights import ALIGNMENT, HostWeights
from wan_core.execution.memory.planning import beside_weights, unit_bytes
from wan_core.execution.memory.residency import Residency
from wan_core.execution.optimize import optimize
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.config import T2V_A14B, DiTConfig
from wan_core.models.wan.families.fun import CAMERA_A14B, CONTROL_A14B
from wan_core.models.wan.families.plain import fields_of
from wan_core.models.wan.families.vace import VACE_14B
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import ForwardInfo
from wan_core.ops.attention.sdpa import SDPA
from wan_core.ops.attention.sparse.forward import SparseForward
from wan_core.pipeline.model_parts import matrix_parameters
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.plan import Plan, make_plan
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles
from wan_core.sampling.sparsity.schedule import parse_sparse, sparsify

CPU = torch.device("cpu")
GRID = (3, 4, 5)


@pytest.fixture(params=CONFIGS)
def name(request) -> str:
    return request.param


def prepared_model(name: str, seed: int = 0) -> WanModel:
    return optimize(wan_core.load_dit(draw_weights(CONFIGS[name], seed), {"num_heads": 2}), attend=SDPA)


def conditioned(name: str, videos: int = 1, grid: tuple[int, int, int] = GRID) -> Conditioning:
    config = CONFIGS[name]
    drawn, own = draw_inputs(config, (videos, *grid)), OWN[config.family]
    inputs = {own: drawn[own]}
    if own == "control":
        inputs = {own: contexts(drawn[own]), "control_scale": torch.tensor([0.8, 0.6])}
    return Conditioning(
        cond=drawn["context"][:1],
        uncond=drawn["context"][:1].flip(1),
        concat=drawn["x"][:, 16:] if config.in_channels > 16 else None,
        image_features=drawn.get("image"),
        inputs=inputs,
    )


def plan_for(**options) -> Plan:
    return make_plan(task="t2v-14B", **{"steps": 4, "guidance_high": 2.0, "guidance_low": 2.0, **options})


def run(
    models: WanModel | dict[str, WanModel],
    name: str,
    plan: Plan | None = None,
    videos: int = 1,
    grid: tuple[int, int, int] = GRID,
    **options,
) -> torch.Tensor:
    T, Y, X = grid
    noise = torch.randn(videos, 16, T, 2 * Y, 2 * X, generator=torch.Generator().manual_seed(2))
    acquire = models.__getitem__ if isinstance(models, dict) else lambda _: models
    with torch.no_grad():
        conditioning = conditioned(name, videos, grid)
        return denoise(plan_for() if plan is None else plan, acquire, conditioning, noise, **options)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_branches_together_equal_one_after_the_other(name):
    model = prepared_model(name)
    for videos in (1, 2):
        alone = run(model, name, videos=videos)
        assert difference(run(model, name, videos=videos, batched=True), alone) < 1e-4


def test_two_experts_each_prepare_their_own(name):
    """Neither expert of A14B sees what the other made of the control."""
    experts = {"high": prepared_model(name), "low": prepared_model(name, 7)}
    plan = make_plan(task="t2v-A14B", steps=4, guidance_high=2.0, guidance_low=2.0)
    assert len(plan.phases) == 2
    latents = run(experts, name, plan)
    assert all(difference(run(model, name, plan), latents) > 1e-3 for model in experts.values())
    assert torch.equal(run(experts, name, plan), latents)


def test_step_caching_changes_the_video_a_little(name):
    model, plan = prepared_model(name), plan_for(steps=10)
    skip = SkipOptions(taylorseer=TaylorSeerOptions(interval=2, order=1, retention=0.2))
    cached = skip_forwards(plan, skip, None, None)
    assert any(step.skipped for step in cached.steps)
    whole = run(model, name, plan)
    assert 1e-6 < difference(run(model, name, cached), whole) < 0.5
    assert torch.equal(run(model, name, plan), whole)  # nothing stays behind


@pytest.mark.parametrize("resident", [0, 1])
def test_streamed_blocks_give_the_same_bits(name, resident):
    exact = run(prepared_model(name), name)
    residency = Residency(CPU, "stream", resident_blocks=resident)
    residency.add("high", prepared_model(name))
    for _ in range(2):  # the second video finds what the first left
        assert torch.equal(run(residency.use("high"), name), exact)


@given(
    name=st.sampled_from(list(CONFIGS)),
    kind=st.sampled_from(["0.0001/0", "0.9/1"]),
    grid=st.tuples(st.integers(2, 4), st.integers(2, 5), st.integers(2, 5)),
)
@settings(max_examples=15, deadline=None)
def test_the_order_of_tiles_changes_nothing(name, kind, grid):
    """Control videos and cameras find their tokens in the order of the tiles, and the reference stays in front. Every
    block is read: because all are chosen, or in dense steps of a sparse phase."""
    model, plan = prepared_model(name), plan_for(steps=3)
    everything = sparsify(plan, parse_sparse(f"{kind}:ramp0"))
    assert everything.sparse is not None
    assert difference(run(model, name, everything, grid=grid), run(model, name, plan, grid=grid)) < 1e-4


def test_sparse_attention_reads_less(name):
    model, plan = prepared_model(name), plan_for()
    whole = run(model, name, plan)
    latents = run(model, name, sparsify(plan, parse_sparse("0.9/0:ramp0")))
    assert 1e-5 < difference(latents, whole) < 0.3
    assert torch.equal(run(model, name, plan), whole)  # nothing stays behind


def test_vace_blocks_choose_for_themselves():
    """Each of 4 blocks, and each of 2 VACE blocks for each of 2 control videos, makes a choice of its own."""
    model, drawn = prepared_model("vace"), draw_inputs(CONFIGS["vace"], (1, *GRID))
    options = sparsify(plan_for(), parse_sparse("0.9/0:ramp0")).sparse
    assert options is not None
    choose, routes = SparseForward.route, []
    noted = mock.patch.object(SparseForward, "route", lambda *of: routes.append(choose(*of)) or routes[-1])
    with torch.no_grad(), noted, in_tiles(model, SparseTiles(model, options, GRID)):
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
    model, plan = prepared_model("vace"), plan_for()

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
    with pytest.raises(ValueError, match="factors for 3 control videos, and 2 are given"):
        with_strength(1.0, 1.0, 0.5)

"""Every family through the denoising loop, with everything that makes it fast: each equals the plain run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling.family_runs import CONFIGS, DRIVEN, conditioned, difference, plan_for, prepared_model, run
from wan_core.config import MagCacheOptions, SkipOptions, SparseOptions, TaylorSeerOptions
from wan_core.execution.memory.residency import Residency
from wan_core.sampling.cache.curves import Curve
from wan_core.sampling.cache.magcache import skip_magcache
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.sparsity.schedule import sparsify

SKIP = SkipOptions(taylorseer=TaylorSeerOptions(interval=2, retention=0.2))


@pytest.fixture(params=CONFIGS)
def name(request) -> str:
    return request.param


def test_branches_together_equal_one_after_the_other(name):
    model = prepared_model(name)
    alone = run(model, name, videos=2)
    assert difference(run(model, name, videos=2, batched=True), alone) < 1e-4


@pytest.mark.parametrize("name", [*DRIVEN, "s2v"])
def test_what_differs_between_branches_counts(name):
    model, conditions = prepared_model(name), conditioned(name)
    if name == "animate2":
        model.config = replace(model.config, unconditional_skips=1)
    other = run(model, name, conditioning=replace(conditions, uncond_inputs={}))
    assert difference(other, run(model, name)) > 1e-4


def test_conditioning_travels_flat(name):
    conditions = conditioned(name)
    conditions = replace(conditions, inputs={**conditions.inputs, "log_scale": -1.3, "comfyui_positions": True})
    unpacked = Conditioning.of(conditions.flat())
    assert unpacked.flat().keys() == conditions.flat().keys()
    assert all(torch.equal(value, conditions.flat()[key]) for key, value in unpacked.flat().items())
    assert unpacked.uncond_inputs.get("unconditional") is conditions.uncond_inputs.get("unconditional")
    assert unpacked.inputs["log_scale"] == -1.3 and unpacked.inputs["comfyui_positions"] is True


@pytest.mark.parametrize(("name", "policy"), [*((name, "taylorseer") for name in CONFIGS), ("s2v", "magcache")])
def test_step_caching_changes_the_video_a_little(name, policy):
    """Also where a driving pass is no step: it is not replaced, and nothing is kept of it. One family is enough for
    MagCache: both policies walk the same plan."""
    model, plan, ratios = prepared_model(name), plan_for(name, steps=10), (1.0, *[0.99] * 9)
    curve = Curve(task="s2v-14B", source="", high_steps=10, shift=3.0, boundary=0.0, solver=plan.solver, samples=None,
                  cond=ratios, uncond=ratios)  # fmt: skip
    magcache = MagCacheOptions(threshold=0.4, max_skips=2, retention=0.2)
    cached = skip_forwards(plan, SKIP, None, None) if policy == "taylorseer" else skip_magcache(plan, magcache, curve)
    assert any(step.skipped for step in cached.steps)
    whole = run(model, name, plan)
    assert 1e-6 < difference(run(model, name, cached), whole) < 0.5
    assert torch.equal(run(model, name, plan), whole)  # nothing stays behind


def test_streamed_blocks_give_the_same_bits(name):
    """A driving pass streams them too."""
    exact = run(prepared_model(name), name)
    residency = Residency(torch.device("cpu"), "stream", resident_blocks=1)
    residency.add("high", prepared_model(name))
    for _ in range(2):  # the second video finds what the first left
        assert torch.equal(run(residency.use("high"), name), exact)


@given(grid=st.none() | st.tuples(st.integers(2, 4), st.integers(4, 6), st.integers(4, 6)))
@settings(max_examples=3, deadline=None)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_order_of_tiles_changes_nothing(name, grid):
    """Tokens in the order of the tiles find their control video, camera, face, driving frame, sound and modulation.
    Every block is read."""
    model, plan = prepared_model(name), plan_for(name, steps=3)
    grid = None if name in DRIVEN else grid
    everything = sparsify(plan, SparseOptions.parse("0.0001:ramp0"))
    assert everything.sparse is not None
    assert difference(run(model, name, everything, grid=grid), run(model, name, plan, grid=grid)) < 1e-4


def test_sparse_attention_reads_less(name):
    model, plan = prepared_model(name), plan_for(name)
    whole = run(model, name, plan)
    latents = run(model, name, sparsify(plan, SparseOptions.parse("0.9:ramp0")))
    assert 1e-5 < difference(latents, whole) < 0.5
    assert torch.equal(run(model, name, plan), whole)  # nothing stays behind

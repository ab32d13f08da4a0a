"""S2V through the denoising loop, with everything that makes it fast: each equals the plain run."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st

import wan_core
from tests.animate_references import draw_weights
from tests.denoised import denoise
from tests.s2v_references import S2V, draw_inputs
from wan_core.config import MagCacheOptions, OptionError, SkipOptions, SparseOptions, TaylorSeerOptions
from wan_core.execution.memory.planning import beside_weights
from wan_core.execution.memory.residency import Residency
from wan_core.execution.optimize import optimize
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families.s2v import S2V_14B
from wan_core.models.wan.families.wan import TASKS as WAN_TASKS
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import ForwardInfo
from wan_core.ops.attention.protocol import Attention
from wan_core.ops.attention.sdpa import SDPA
from wan_core.ops.attention.tiles import make_tiles
from wan_core.sampling.cache.magcache import Curve, skip_magcache
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.plan import Plan, make_plan
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles
from wan_core.sampling.sparsity.schedule import parse_sparse, sparsify

CPU = torch.device("cpu")
GRID = (1, 3, 4, 5)


def sound_model() -> WanModel:
    return optimize(wan_core.load_dit(draw_weights(S2V), {"num_heads": S2V.num_heads}), attend=SDPA)


MODEL = sound_model()


def conditioned(videos: int = 1) -> Conditioning:
    """A prompt and a negative prompt, which hears nothing but zeros."""
    drawn = draw_inputs(S2V, (videos, *GRID[1:]))
    inputs = {name: drawn[name] for name in ("audio", "reference", "motion", "pose")}
    text, silent = drawn["context"][:1], torch.zeros_like(drawn["audio"])
    return Conditioning(cond=text, uncond=text.flip(1), inputs=inputs, uncond_inputs={"audio": silent})


def plan_for(**options) -> Plan:
    return make_plan(task="s2v-14B", **{"steps": 4, "guidance_high": 2.0, "guidance_low": 2.0, **options})


def run(model: WanModel, plan: Plan | None = None, videos: int = 1, **options) -> torch.Tensor:
    noise = torch.randn(videos, 16, GRID[1], 2 * GRID[2], 2 * GRID[3], generator=torch.Generator().manual_seed(2))
    conditions = options.pop("conditioning", conditioned(videos))
    with torch.no_grad():
        return denoise(plan or plan_for(), lambda _: model, conditions, noise, **options)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_branches_together_equal_one_after_the_other():
    model = sound_model()
    for videos in (1, 2):
        assert difference(run(model, videos=videos, batched=True), run(model, videos=videos)) < 1e-4


def test_what_the_negative_prompt_hears_counts():
    model, conditions = sound_model(), conditioned()
    assert difference(run(model, conditioning=replace(conditions, uncond_inputs={})), run(model)) > 1e-4


def test_conditioning_travels_flat():
    conditions = replace(conditioned(), inputs={**conditioned().inputs, "comfyui_positions": True})
    unpacked = Conditioning.of(conditions.flat())
    assert unpacked.inputs["comfyui_positions"] is True
    assert difference(run(sound_model(), conditioning=unpacked), run(sound_model(), conditioning=conditions)) == 0.0


@pytest.mark.parametrize("policy", ["taylorseer", "magcache"])
def test_step_caching_changes_the_video_a_little(policy):
    model, plan = sound_model(), plan_for(steps=10)
    if policy == "taylorseer":
        skip = SkipOptions(taylorseer=TaylorSeerOptions(interval=2, order=1, retention=0.2))
        cached = skip_forwards(plan, skip, None, None)
    else:
        ratios = (1.0, *[0.99] * 9)
        curve = Curve(
            task="s2v-14B", source="", high_steps=10, shift=3.0, boundary=0.0, solver=plan.solver, samples=None,
            cond=ratios, uncond=ratios,
        )  # fmt: skip
        cached = skip_magcache(plan, MagCacheOptions(threshold=0.4, max_skips=2, retention=0.2), curve)
    assert any(step.skipped for step in cached.steps)
    whole = run(model, plan)
    assert 1e-6 < difference(run(model, cached), whole) < 0.5
    assert torch.equal(run(model, plan), whole)  # nothing stays behind


@pytest.mark.parametrize("resident", [0, 1])
def test_streamed_blocks_give_the_same_bits(resident):
    exact = run(sound_model())
    residency = Residency(CPU, "stream", resident_blocks=resident)
    residency.add("high", sound_model())
    for _ in range(2):  # the second video finds what the first left
        assert torch.equal(run(residency.use("high")), exact)


GRIDS = {"T": st.integers(1, 4), "Y": st.integers(4, 9), "X": st.integers(4, 9), "motion": st.booleans()}


def forward(model: WanModel, T: int, Y: int, X: int, motion: bool, info: ForwardInfo) -> torch.Tensor:
    drawn = draw_inputs(S2V, (1, T, Y, X), motion=19 if motion else None)
    x, timestep, context = (drawn.pop(name) for name in ("x", "timestep", "context"))
    with torch.no_grad():
        return model(x, timestep, context, info=info, **drawn)


@settings(max_examples=6, deadline=None)
@over(**GRIDS, resident=st.integers(0, 4))
def test_streamed_blocks_give_the_same_bits_at_every_grid(T, Y, X, motion, resident):
    residency = Residency(CPU, "stream", resident_blocks=resident)
    residency.add("high", sound_model())
    exact = forward(sound_model(), T, Y, X, motion, ForwardInfo())
    assert torch.equal(forward(residency.use("high"), T, Y, X, motion, ForwardInfo()), exact)


@settings(max_examples=6, deadline=None)
@over(**GRIDS)
def test_sparse_attention_that_reads_every_block_is_dense_at_every_grid(T, Y, X, motion):
    model = sound_model()
    exact = forward(model, T, Y, X, motion, ForwardInfo())
    tiles = SparseTiles(model, SparseOptions(sparsity=0.0001, kernel="math"), (T, Y, X))
    with in_tiles(model, tiles):
        output = forward(model, T, Y, X, motion, ForwardInfo(sparsity=0.0001))
    assert difference(output, exact) < 1e-4


@pytest.mark.parametrize("kind", ["0.0001/0", "0.9/1"])
def test_the_order_of_tiles_changes_nothing(kind):
    """Tokens in the order of the tiles find their sound and their modulation. Every block is read: because all are
    chosen, in dense steps of a sparse phase, in dense layers of a sparse step."""
    model, plan = sound_model(), plan_for()
    everything = sparsify(plan, parse_sparse(f"{kind}:ramp0"))
    assert everything.sparse is not None
    assert difference(run(model, everything), run(model, plan)) < 1e-4


class Watched(Attention):
    """Keeps the queries of every call, and how many keys each has."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, int]] = []

    def __call__(self, q, k, v, call=None):
        self.calls.append((q, k.shape[1]))
        return SDPA(q, k, v)


@settings(max_examples=10, deadline=None)
@over(
    T=st.integers(2, 4), Y=st.integers(4, 9), X=st.integers(4, 9), motion=st.booleans(), reference=st.booleans(),
)  # fmt: skip
def test_sparse_steps_read_tokens_beside_the_video_whole(T, Y, X, motion, reference):
    """The order has every token once, the video's first; the others are read by every block and read all keys."""
    model, watched = MODEL, Watched()
    drawn = draw_inputs(S2V, (1, T, Y, X), motion=3 if motion else None)
    if not reference:
        del drawn["reference"]
    for block in model.blocks:
        block.self_attn.attend = watched
    tiles = SparseTiles(model, SparseOptions(sparsity=0.9, kernel="math"), (T, Y, X))
    seen = []
    inner = tiles.arranged
    tiles.arranged = lambda inputs: seen.append(inner(inputs)) or seen[-1]
    x, timestep, context = (drawn.pop(name) for name in ("x", "timestep", "context"))
    with torch.no_grad(), in_tiles(model, tiles):
        output = model(x, timestep, context, info=ForwardInfo(sparsity=0.9), **drawn)
    (order, rule), video = seen[0], prod((T, Y, X))
    length = len(order.order)
    assert torch.isfinite(output).all()
    assert torch.equal(order.order.sort().values, torch.arange(length))
    assert torch.equal(order.order[video:], torch.arange(video, length))
    assert torch.equal(order.order[:video], make_tiles((T, Y, X), order.block, CPU).order)  # frames are not kept apart
    dense = [(q.shape[1], keys) for q, keys in watched.calls]
    assert dense == ([(length - video, length)] * len(model.blocks) if length > video else [])
    assert bool(order.forced[:, video // order.block :].all()) or length == video
    assert rule is not None


def test_sparse_attention_reads_less():
    model, plan = sound_model(), plan_for()
    whole = run(model, plan)
    latents = run(model, sparsify(plan, parse_sparse("0.9/0:ramp0")))
    assert 1e-5 < difference(latents, whole) < 0.5
    assert torch.equal(run(model, plan), whole)  # nothing stays behind


def test_sparse_attention_around_a_ring_is_refused():
    model = sound_model()
    drawn = draw_inputs(S2V, GRID)
    tiles = SparseTiles(model, SparseOptions(sparsity=0.9, kernel="math"), GRID[1:])

    class OnARing(Attention):
        ring_size = 2

    tiles.around = [OnARing()] * len(model.blocks)
    x, timestep, context = (drawn.pop(name) for name in ("x", "timestep", "context"))
    with pytest.raises(OptionError, match="around a ring"), in_tiles(model, tiles):
        model(x, timestep, context, **drawn)


def test_the_memory_plan_counts_every_token():
    """832 x 480, 77 frames: reference and motion frames are an eighth of the video's tokens."""
    wan = next(task.full_size for task in WAN_TASKS if task.name == "t2v-A14B")
    assert wan is not None
    latents = (1, 16, 20, 60, 104)
    assert S2V_14B.tokens(*latents[2:]) == 20 * 1560 + 1560 + 1560 + 390 + 364
    one, other = (beside_weights(dit, VAE_21, latents, per_token=5.05).denoise for dit in (S2V_14B, wan))
    assert 1.1 * other < one < 1.6 * other

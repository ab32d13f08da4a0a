"""S2V through the denoising loop, with everything that makes it fast: each equals the plain run."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st

from tests.s2v_references import S2V, draw_inputs
from tests.sampling.family_runs import difference, prepared_model
from wan_core.config import SparseOptions
from wan_core.execution.memory.planning import beside_weights
from wan_core.execution.memory.residency import Residency
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families.s2v import S2V_14B
from wan_core.models.wan.families.wan import TASKS as WAN_TASKS
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import ForwardInfo
from wan_core.ops.attention.protocol import Attention
from wan_core.ops.attention.sdpa import SDPA
from wan_core.ops.attention.tiles import make_tiles
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles

CPU = torch.device("cpu")
GRID = (1, 3, 4, 5)


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
    residency.add("high", prepared_model("s2v"))
    exact = forward(prepared_model("s2v"), T, Y, X, motion, ForwardInfo())
    assert torch.equal(forward(residency.use("high"), T, Y, X, motion, ForwardInfo()), exact)


@settings(max_examples=6, deadline=None)
@over(**GRIDS)
def test_sparse_attention_that_reads_every_block_is_dense_at_every_grid(T, Y, X, motion):
    model = prepared_model("s2v")
    exact = forward(model, T, Y, X, motion, ForwardInfo())
    tiles = SparseTiles(model, SparseOptions(sparsity=0.0001, kernel="math"), (T, Y, X))
    with in_tiles(model, tiles):
        output = forward(model, T, Y, X, motion, ForwardInfo(sparsity=0.0001))
    assert difference(output, exact) < 1e-4


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
    model, watched = prepared_model("s2v"), Watched()
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


def test_the_memory_plan_counts_every_token():
    """832 x 480, 77 frames: reference and motion frames are an eighth of the video's tokens."""
    wan = next(task.full_size for task in WAN_TASKS if task.name == "t2v-A14B")
    assert wan is not None
    latents = (1, 16, 20, 60, 104)
    assert S2V_14B.tokens(*latents[2:]) == 20 * 1560 + 1560 + 1560 + 390 + 364
    one, other = (beside_weights(dit, VAE_21, latents, per_token=5.05).denoise for dit in (S2V_14B, wan))
    assert 1.1 * other < one < 1.6 * other

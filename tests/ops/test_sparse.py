"""Block-sparse attention: the order of tokens, the choice of blocks, and attention over what was chosen.

Legend: B batch, L tokens, H heads, D head dim, n blocks.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.sparse_attention import drawn, known_of, random_route, route, whole_block_kernel
from tests.structured import structured
from tests.tensors import relative
from wan_core.ops.attention.protocol import AttentionCall
from wan_core.ops.attention.sdpa import SDPA, math_lse, math_reference
from wan_core.ops.attention.sparse import kernels
from wan_core.ops.attention.sparse.forward import SparseAttention, SparseForward
from wan_core.ops.attention.sparse.kernels import (
    KERNELS,
    sparse_flex,
    sparse_reference,
)
from wan_core.ops.attention.sparse.routing import Route, Rule, gain
from wan_core.ops.attention.tiles import make_tiles
from wan_core.ops.kernels import blocked
from wan_core.ops.kernels.block_layout import channels_first, heads_first
from wan_core.ops.kernels.formats import FP8, Quantized

CPU = torch.device("cpu")
GRIDS = st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 11))
BLOCKS = st.sampled_from([1, 2, 4, 7, 8, 16, 32, 128])
SEEDS = st.integers(0, 1000)
few = settings(max_examples=15, deadline=None)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, route: Route, block: int) -> torch.Tensor:
    """torch's own attention under a mask of tokens, made one entry at a time."""
    B, L, H, _ = q.shape
    mask = torch.zeros(B, H, L, k.shape[1], dtype=torch.bool)
    for b, h, row in itertools.product(range(B), range(H), range(route.blocks.shape[2])):
        for column in route.blocks[b, h, row].tolist():
            mask[b, h, row * block : (row + 1) * block, column * block : (column + 1) * block] = True
    heads = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2)


# --------------------------------------------------------------------------------------------------------------- tiles


@few
@given(GRIDS, BLOCKS, st.booleans())
def test_tiles_are_an_order_of_all_tokens(grid: tuple[int, int, int], block: int, apart: bool) -> None:
    tiles = make_tiles(grid, block, CPU, frames_apart=apart)
    tokens = grid[0] * grid[1] * grid[2]
    assert torch.equal(tiles.order.sort().values, torch.arange(tokens))
    assert torch.equal(tiles.order[tiles.inverse], torch.arange(tokens))
    assert tiles.blocks == -(-tokens // block)
    assert tiles.forced.diagonal().all()
    if apart:  # modulation by frame finds its tokens where they were
        assert torch.equal(tiles.order // (grid[1] * grid[2]), torch.arange(tokens) // (grid[1] * grid[2]))


@pytest.mark.parametrize("grid", [(21, 45, 80), (21, 30, 52), (31, 22, 40), (5, 17, 23)])
def test_a_block_is_a_neighbourhood(grid: tuple[int, int, int]) -> None:
    """Near 2 x 8 x 8: no block reaches farther than a few of those; a line of 128 tokens does."""
    tiles = make_tiles(grid, 128, CPU)
    cells = torch.stack(torch.unravel_index(tiles.order, grid), 1)
    sides = torch.stack([part.amax(0) - part.amin(0) + 1 for part in cells.split(128)]).float()
    assert (sides[:, 0] <= 4).all()
    assert (sides[:, 1:].amax(1) <= 16).all()
    assert sides.prod(1).mean() < 2 * 128  # boxes around blocks are hardly larger than they


def test_neighbours_in_time_are_forced() -> None:
    tiles = make_tiles((6, 8, 8), 64, CPU)
    frames = tiles.order // 64
    for row in range(tiles.blocks):
        mine = frames[row * 64 : (row + 1) * 64]
        read = torch.cat([frames[c * 64 : (c + 1) * 64] for c in tiles.forced[row].nonzero()[:, 0].tolist()])
        assert read.min() == max(0, int(mine.min()) - 1) or read.min() < mine.min() or mine.min() == 0
        assert read.max() > mine.max() or mine.max() == 5
        assert tiles.forced[row].sum() <= 3  # what is chosen is left to the route


# ------------------------------------------------------------------------------------------------------------- routing


@few
@given(GRIDS, st.sampled_from([4, 8, 16]), SEEDS, st.floats(0.05, 1))
@example(grid=(1, 3, 3), block=8, seed=0, keep=0.5)  # a block of one token, whose score is as low as any
def test_a_route_keeps_what_it_must(grid: tuple[int, int, int], block: int, seed: int, keep: float) -> None:
    tiles = make_tiles(grid, block, CPU)
    rule = Rule(keep)
    chosen = route(*drawn(len(tiles.order), seed), block, rule, tiles.forced)
    most, selected = rule.most(tiles.blocks), chosen.kept(tiles.blocks)
    assert chosen.blocks.dtype == torch.int32
    assert chosen.blocks.shape[-1] == most
    assert (selected.sum(-1) == most).all()  # none twice
    room = tiles.forced.sum(1) <= most
    assert (selected | ~tiles.forced)[:, :, room].all()


def test_the_gain_of_scatter_is_that_of_drawn_scores() -> None:
    """log mean exp of normal scores: half the variance where it is small, and no more than the largest draw."""
    generator = torch.Generator().manual_seed(0)
    size = torch.tensor([128])
    for spread in (0.3, 1.0, 2.0, 6.0):
        drawn_scores = spread * torch.randn(4000, 128, generator=generator)
        measured = (drawn_scores.logsumexp(1) - torch.tensor(128.0).log()).mean()
        assert gain(torch.tensor([spread**2]), size).item() == pytest.approx(measured.item(), rel=0.25, abs=0.05)


def test_routing_finds_attention_that_has_structure() -> None:
    """On drawn maps of attention: nearer to what all keys give than by a random choice, and in tiles than in lines."""
    grid, block = (6, 16, 20), 32
    losses = {}
    for raster in (False, True):
        tiles = make_tiles(grid, block, CPU, raster=raster)
        q, k, v = (x[:, tiles.order] for x in structured(grid, heads=4, dim=32))
        exact, means, n = math_reference(q, k, v), known_of(k, v, block), tiles.blocks
        rows = torch.rand(1, 4, n, n, generator=torch.Generator().manual_seed(0)).argsort(-1)
        for name, chosen in (
            ("chosen", route(q, k, v, block, Rule(0.25), tiles.forced)),
            ("any", Route(rows[..., : Rule(0.25).most(n)].int())),
        ):
            out, lse = sparse_reference(q, k, v, chosen, block)
            output = blocked.finish(out, lse, q, block, pooled=means.pooled(chosen.kept(n)))
            losses[name, raster] = relative(output, exact)
    assert losses["chosen", False] < 0.9 * losses["chosen", True]
    assert losses["chosen", False] < 0.7 * losses["any", False]


# ----------------------------------------------------------------------------------------------------------- attention


@few
@given(st.integers(1, 90), BLOCKS, SEEDS)
def test_the_reference_is_attention_under_a_mask(tokens: int, block: int, seed: int) -> None:
    q, k, v = drawn(tokens, seed)
    chosen = random_route(tokens, block, seed)
    out, lse = sparse_reference(q, k, v, chosen, block)
    torch.testing.assert_close(out, masked(q, k, v, chosen, block), rtol=1e-4, atol=1e-5)
    every = torch.arange(-(-tokens // block), dtype=torch.int32).expand(*chosen.blocks.shape[:3], -1).contiguous()
    out, lse = sparse_reference(q, k, v, Route(every), block)
    dense, dense_lse = math_lse(q, k, v)
    torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, dense_lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [4, 7])
def test_the_reference_holds_some_rows_at_a_time(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(60, 3)
    chosen = random_route(60, block, 3)
    whole = sparse_reference(q, k, v, chosen, block)
    sizes: list[int] = []
    masks = kernels.spread
    monkeypatch.setattr(kernels, "SCORES", 2 * 60 * 2 * block)  # two blocks of queries of both samples
    monkeypatch.setattr(kernels, "spread", lambda *arguments: sizes.append(arguments[2]) or masks(*arguments))
    parts = sparse_reference(q, k, v, chosen, block)
    assert max(sizes) == 2 * block
    for a, b in zip(parts, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("tokens", "block"), [(64, 16), (33, 8)])
def test_flex_is_the_reference(tokens: int, block: int) -> None:
    q, k, v = drawn(tokens, 1)
    chosen = random_route(tokens, block, 1)
    out, lse = sparse_flex(q, k, v, chosen, block)
    expected, expected_lse = sparse_reference(q, k, v, chosen, block)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("run", [sparse_reference, sparse_flex])
def test_what_lies_behind_the_keys_is_never_read(run: object) -> None:
    """q, k and v are the beginnings of longer tensors of NaN, as they are where a buffer is rounded up."""
    big = [torch.full((2, 80, 3, 16), float("nan")) for _ in range(3)]
    for whole, part in zip(big, drawn(60, 2), strict=True):
        whole[:, :60] = part
    q, k, v = (whole[:, :60] for whole in big)
    chosen = random_route(60, 16, 2)
    out, lse = run(q, k, v, chosen, 16)  # type: ignore[operator]
    assert out.isfinite().all()
    assert lse.isfinite().all()
    torch.testing.assert_close(out, masked(*drawn(60, 2), chosen, 16), rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ the FP8 layout


@few
@given(st.integers(1, 70), st.sampled_from([16, 32]), SEEDS)
def test_memory_in_whole_blocks_ends_in_zeros(tokens: int, block: int, seed: int) -> None:
    x = Quantized(drawn(tokens, seed)[0].to(FP8), torch.ones(1))
    for lay, turned in ((heads_first, (0, 2, 1, 3)), (channels_first, (0, 2, 3, 1))):
        laid = lay(x, block)
        assert laid.tokens == tokens and laid.scale is x.scale
        assert torch.equal(laid.data.float(), x.data.float())
        assert laid.data.untyped_storage().data_ptr() == laid.memory.untyped_storage().data_ptr()
        memory = laid.memory.float()
        assert memory.is_contiguous()
        last = 3 if laid.channels_first else 2
        assert memory.shape[last] == -(-tokens // block) * block
        assert not memory.narrow(last, tokens, memory.shape[last] - tokens).any()
        assert torch.equal(memory.narrow(last, 0, tokens), x.data.float().permute(turned))


@few
@given(st.integers(1, 70), SEEDS)
def test_means_and_variances_of_blocks(tokens: int, seed: int) -> None:
    fp8 = Quantized(drawn(tokens, seed)[0].to(FP8), torch.ones(1))
    x = fp8.data.float()
    for given_x in (x, heads_first(fp8, 16).data, channels_first(fp8, 16).data):
        mean, variance = blocked.pool(given_x, 16)
        for n, part in enumerate(x.split(16, 1)):
            torch.testing.assert_close(mean[:, :, n], part.mean(1))
            torch.testing.assert_close(variance[:, :, n], part.var(1, correction=0), rtol=1e-4, atol=1e-6)


@few
@given(st.integers(20, 70), SEEDS)
def test_keys_of_zeros_are_taken_out_exactly(tokens: int, seed: int) -> None:
    block = 16
    q, k, v = (t.to(FP8).float() for t in drawn(tokens, seed))
    k = (k - k.mean(1, keepdim=True)).to(FP8).float()
    n = -(-tokens // block)
    chosen = random_route(tokens, block, seed)
    one = torch.ones(1)
    laid = [heads_first(Quantized(t.to(FP8), one), block) for t in (q, k)]
    values = channels_first(Quantized(v.to(FP8), one), block)
    out, lse = whole_block_kernel(*laid, values, chosen, block)
    tail = (chosen.blocks == n - 1).any(-1)
    exact, _ = sparse_reference(q, k, v, chosen, block)
    output = blocked.finish(out, lse, q, block, pads=-tokens % block, tail=tail)
    torch.testing.assert_close(output, exact, rtol=2e-3, atol=1e-4)
    if -tokens % block and tail.any():
        assert not torch.allclose(out, exact, rtol=2e-3, atol=1e-4)  # the pads did count before


def test_the_log_sum_exp_is_of_all_that_is_attended_to() -> None:
    """The blocks that are read count, and the means of the others, each weighted by its keys: keys that are attended
    to elsewhere are merged by it."""
    generator = torch.Generator().manual_seed(3)
    grid, block = (2, 5, 7), 16
    tiles = make_tiles(grid, block, torch.device("cpu"))
    q, k, v = torch.randn(3, 2, 70, 2, 8, generator=generator)
    state = SparseForward(KERNELS["math"], [SDPA], tiles, Rule(0.4))
    call = AttentionCall(sparse=state)
    out, lse = SparseAttention().with_lse(q, k, v, call)
    assert torch.equal(out, SparseAttention()(q, k, v, call))
    route = state.route(blocked.pool(q, block)[0], state.known(k, v))
    read = kernels.spread(route.kept(tiles.blocks), block, 70, 70)
    scores = torch.einsum("blhd,bshd->bhls", q, k) * 8**-0.5
    blocks = torch.arange(70) // block
    means = torch.stack([k[:, blocks == n].mean(1) for n in range(tiles.blocks)], 1)[:, blocks]
    wanted = torch.where(read, scores, torch.einsum("blhd,bshd->bhls", q, means) * 8**-0.5)
    assert not bool(read.all())
    torch.testing.assert_close(lse, wanted.logsumexp(-1), rtol=1e-5, atol=1e-5)

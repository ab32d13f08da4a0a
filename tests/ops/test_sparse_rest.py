"""What replaces unselected blocks: their means and the first-order term, and the choice by expected error.

Legend: B batch, L tokens, H heads, D head dim, n blocks.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.test_sparse import CPU, SEEDS
from tests.sparse_attention import drawn, known_of, random_route
from wan_core.ops.attention.sdpa import math_reference
from wan_core.ops.attention.sparse.kernels import sparse_reference
from wan_core.ops.attention.sparse.routing import expected_error
from wan_core.ops.attention.sparse.slopes import Covariances, slope_weights, slopes
from wan_core.ops.attention.tiles import make_tiles
from wan_core.ops.kernels import blocked
from wan_core.ops.kernels.block_layout import Blocked, channels_first, heads_first
from wan_core.ops.kernels.formats import FP8, Quantized

few = settings(max_examples=15, deadline=None)


# ------------------------------------------------------------------------------------------------------------- means


@few
@given(st.integers(8, 70), st.sampled_from([8, 16]), SEEDS)
def test_means_are_exact_where_each_block_is_constant(tokens: int, block: int, seed: int) -> None:
    q, k, v = drawn(tokens, seed)
    for t in (k, v):
        t.copy_(torch.cat([one.mean(1, keepdim=True).expand_as(one) for one in t.split(block, 1)], 1))
    chosen = random_route(tokens, block, seed)
    out, lse = sparse_reference(q, k, v, chosen, block)
    pooled = known_of(k, v, block).pooled(chosen.kept(-(-tokens // block)))
    output = blocked.finish(out, lse, q, block, pooled=pooled)
    torch.testing.assert_close(output, math_reference(q, k, v), rtol=1e-3, atol=1e-4)
    wanted = q.float().transpose(1, 2) @ k.float().permute(0, 2, 3, 1) * q.shape[-1] ** -0.5
    total = blocked.final_lse(lse, q, block, pooled=pooled)
    torch.testing.assert_close(total, wanted.logsumexp(-1), rtol=1e-3, atol=1e-4)


# ------------------------------------------------------------------------------------------------ the first-order term


@few
@given(st.integers(20, 70), st.sampled_from([8, 16]), SEEDS)
def test_the_slope_takes_the_first_order_away(tokens: int, block: int, seed: int) -> None:
    """With small queries attention is linear in them: the means alone are off to first order, with the slope hardly."""
    q, k, v = drawn(tokens, seed)
    q = 0.02 * q
    chosen = random_route(tokens, block, seed)
    selected, means = chosen.kept(-(-tokens // block)), known_of(k, v, block)
    out, lse = sparse_reference(q, k, v, chosen, block)
    exact = math_reference(q, k, v)
    pooled = means.pooled(selected)
    weights = slope_weights(blocked.pool(q, block)[0], means, selected)
    sloped = pooled._replace(slopes=slopes(weights, means.keys, k, v, block))
    plain, better = (blocked.finish(out, lse, q, block, pooled=p) - exact for p in (pooled, sloped))
    assert better.norm() < 0.1 * plain.norm() or bool(selected.all())


def test_slopes_of_fp8_in_whole_blocks_are_those_of_plain_numbers() -> None:
    tokens, block = 75, 16
    tiles = make_tiles((3, 5, 5), block, CPU)
    q, k, v = drawn(tokens, 3)
    k, v = (Quantized(t.to(FP8), torch.full((1,), scale)) for t, scale in ((k, 0.5), (v, 3.0)))
    plain = k.dequantize(torch.float32), v.dequantize(torch.float32)
    means = known_of(*plain, block)
    weights = slope_weights(blocked.pool(q, block)[0], means, random_route(tokens, block, 3).kept(tiles.blocks))
    expected = slopes(weights, means.keys, *plain, block)
    assert expected.norm() > 0
    laid: tuple[Blocked, Blocked] = heads_first(k, block), channels_first(v, block)
    for given_k, given_v in (laid, (k, v)):
        slope = slopes(weights, means.keys, given_k, given_v, block)
        torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-5)
    for cut in (0, 48, 64):  # keys whose covariances are kept for several sets of rows, and others behind
        count = cut // block
        slope = slopes(weights[..., count:], means.keys[:, :, count:], *(x[:, cut:] for x in plain), block)
        earlier = Covariances(means.keys[:, :, :count], *(x[:, :cut] for x in plain), block)
        earlier.add_to(slope, weights[..., :count])
        torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- routing


def test_the_expected_error_is_found_where_values_and_scores_scatter() -> None:
    """Two blocks have the same mass: one with constant keys is replaced exactly, one with constant values nearly so."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 64, 1, 16, generator=generator)
    q = q.mean(1, keepdim=True).expand_as(q) + 3 * q[:, :1]
    v[:, 16:32] = v.mean(1, keepdim=True)  # as far from the output as can be guessed: not at all
    k[:, 32:48] = k[:, 32:48].mean(1, keepdim=True)
    worth = expected_error(blocked.pool(q, 16)[0], known_of(k, v, 16))[0, 0, 0]
    assert worth[2] < worth[1] < min(worth[0], worth[3])

"""Our own attention kernel in Triton's interpreter, which takes no bf16 products: fp16 here, bf16 in test_gpu_*.py. Its
tiles, and how sparse attention hands it the means."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.sparse_attention import expected_sparse, int8_reference
from tests.tensors import qkv, relative, run_interpreted
from wan_core.ops.attention.fp8 import key_mean
from wan_core.ops.attention.protocol import AttentionCall
from wan_core.ops.attention.sdpa import math_lse
from wan_core.ops.attention.sparse.forward import SparseForward
from wan_core.ops.attention.sparse.kernels import KERNELS, SparseKernel
from wan_core.ops.attention.sparse.routing import Rule
from wan_core.ops.attention.tiles import make_tiles
from wan_core.ops.cards import CARDS
from wan_core.ops.kernels.attention_tiles import CANDIDATES, SHARED, TILES, candidates, tile_for

DENSE = """
import torch
from wan_core.ops.attention.fp8 import key_mean
from tests.sparse_attention import int8_reference
from wan_core.ops.attention.dense import triton, triton_int8
from wan_core.ops.attention.sdpa import math_lse
from wan_core.ops.kernels.attention_tiles import Tile
from wan_core.ops.kernels.triton_attention import attention

generator = torch.Generator().manual_seed(0)
def draw(*shape): return torch.randn(shape, generator=generator)
def relative(found, expected): return float((found.float() - expected.float()).norm() / expected.float().norm())

for L, S, H, D in ((77, 53, 2, 64), (20, 96, 3, 128), (130, 1, 1, 32), (1, 200, 2, 64), (64, 64, 1, 128)):
    one = draw(2, max(L, S), 3, H, D)
    q, k, v = (one[:, :n, i].half() for i, n in enumerate((L, S, S)))  # views of one tensor
    k = k + (1 if S > 1 else 0)
    q, k, v = q * 2, k.half(), v
    out, lse = math_lse(q.float(), k.float(), v.float())
    for tile in (Tile(16, 16, 4, 2), Tile(64, 32, 4, 2), None):
        found = attention(q, k, v, tile=tile)
        assert found[0].is_contiguous() and found[0].dtype == q.dtype
        assert relative(found[0], out) < 1e-3 and (found[1] - lse).abs().max() < 1e-3, (L, S, tile)
        found, expected = attention(q, k, v, centre=key_mean(k), tile=tile), int8_reference(q, k, v)
        errors = relative(found[0], expected[0]), float((found[1] - expected[1]).abs().max())
        assert max(errors) < 2e-3, (L, S, tile, errors)
    if S > 1:
        assert relative(triton(q, k, v)[0], out) < 1e-3 < relative(triton_int8(q, k, v)[0], out) < 0.05
print("all close")
"""
SPARSE = """
import torch
from tests.sparse_attention import draw_route, expected_sparse
from tests.tensors import relative
from wan_core.ops.attention.sparse.kernels import sparse_triton, sparse_triton_int8

for tokens, block, counts in ((150, 32, False), (128, 32, True), (97, 16, True)):
    q, k, v, route, pooled = draw_route(tokens, block, counts=counts)
    for means in (None, pooled):
        out, lse = expected_sparse(q, k, v, route, block, means)
        for kernel, allowed in ((sparse_triton, 2e-3), (sparse_triton_int8, 0.05)):
            found = kernel(q, k, v, route, block, means)
            assert relative(found[0], out) < allowed and (found[1] - lse).abs().max() < 3 * allowed, (tokens, kernel)
print("all close")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install triton")
@pytest.mark.parametrize("code", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_the_kernel_is_the_reference(code):
    run_interpreted(code)


@pytest.mark.parametrize(("offset", "allowed"), [(0.0, 0.015), (20.0, 0.015)])
def test_int8_is_close_whatever_the_keys_mean_is(offset, allowed):
    q, k, v = qkv(200, 300, 3, 64)
    out, lse = int8_reference(q, k + offset, v)
    expected = math_lse(q, k + offset, v)
    assert 1e-4 < relative(out, expected[0]) < allowed
    assert (lse - expected[1]).abs().max() < 0.03
    assert key_mean(k).shape == (1, 1, 3, 64)


def test_every_card_has_tiles_that_fit():
    assert TILES.keys() == SHARED.keys()
    for since, kinds in TILES.items():
        for kind, tile in kinds.items():
            assert tile in candidates(since, 128, kind), f"{since}: {tile} takes more shared memory than there is"
    for card in CARDS[1:]:
        assert tile_for(card.since, "bf16") in CANDIDATES and tile_for(None, "int8") in CANDIDATES
    assert tile_for((8, 9), "bf16") == TILES[(8, 6)]["bf16"] != TILES[(8, 0)]["bf16"]
    assert len(candidates((8, 6), 128, "bf16")) < len(candidates((9, 0), 128, "bf16"))
    assert all(128 % tile.queries == 128 % tile.keys == 0 for tile in CANDIDATES)


@pytest.mark.parametrize("keep", [0.25, 1.0])
def test_a_kernel_that_adds_the_means_itself_gives_what_finish_gives(keep):
    """Through `SparseForward`, with the formula in the kernel's place."""
    q, k, v = qkv(144, 144, 2, 16)
    tiles = make_tiles((4, 6, 6), 8, torch.device("cpu"))

    def one_pass(q, k, v, route, block, pooled=None):
        return expected_sparse(q, k, v, route, block, pooled)

    results = []
    for kernel in (
        KERNELS["math"],
        SparseKernel("one pass", "", lambda: one_pass, any_block=True, means=True),
    ):
        state = SparseForward(kernel, [], tiles, Rule(keep))
        out, lse = state.attend_lse(AttentionCall(0), q, k, v)
        assert torch.equal(out, state.attend(AttentionCall(0), q, k, v))
        results.append((out, lse))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6) and torch.allclose(
        results[0][1], results[1][1], atol=1e-5
    )

"""The measured error of sparse attention: sampled rows stand for all, in plain numbers and in FP8."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.sparse_attention import whole_block_kernel
from tests.structured import structured
from wan_core.ops.attention.fp8 import key_mean, math_fp8
from wan_core.ops.attention.protocol import AttentionCall
from wan_core.ops.attention.sdpa import SDPA
from wan_core.ops.attention.sparse.forward import SparseForward
from wan_core.ops.attention.sparse.kernels import KERNELS, SparseKernel
from wan_core.ops.attention.sparse.routing import Rule
from wan_core.ops.attention.sparse.sampled import (
    ROWS,
    Rows,
    Samples,
    finished_rows,
    rounding_of,
    sample_rows,
    squares,
    taken,
)
from wan_core.ops.attention.tiles import make_tiles
from wan_core.ops.kernels.block_layout import Blocked
from wan_core.ops.kernels.blocked import finish, quantize_heads_first, quantize_values
from wan_core.ops.kernels.formats import FP8

CPU = torch.device("cpu")
GRID = (15, 16, 16)


def drawn(kind: str, seed: int, grid: tuple[int, int, int] = GRID, heads: int = 8) -> list[Tensor]:
    """q, k, v [1, L, H, 64] in the order of the tiles."""
    if kind == "structured":
        tensors = structured(grid, heads, 64, seed=seed)
    else:
        tensors = torch.randn(3, 1, math.prod(grid), heads, 64, generator=torch.Generator().manual_seed(seed)).unbind()
    order = make_tiles(grid, 32, CPU).order
    return [x[:, order] for x in tensors]


class Noted:
    """Keeps what is noted. step: of the rows."""

    def __init__(self, step: int = 0) -> None:
        self.step, self.sums = step, dict[int, Tensor]()

    def samples(self) -> Samples:
        return Samples(self.rows, self.note)

    def rows(self, layer: int, tokens: int, device: torch.device) -> Rows:
        return sample_rows(layer, self.step, tokens, device)

    def note(self, layer: int, _: Any, sums: Tensor) -> None:
        self.sums[layer] = sums

    def error(self, layer: int = 0) -> float:
        difference, output = self.sums[layer].sum(1)
        return float((difference / output).sqrt())


@given(st.integers(1, 5000), st.integers(0, 100), st.integers(0, 40))
def test_rows_are_one_of_each_part_and_others_in_the_next_step(tokens: int, step: int, layer: int) -> None:
    rows = sample_rows(layer, step, tokens, CPU)
    count = min(ROWS, tokens)
    assert rows.here.tolist() == list(rows.host) and len(rows.host) == count
    assert all(a <= b for a, b in pairwise(rows.host)) and rows.host[0] >= 0 and rows.host[-1] < tokens
    assert all(part * tokens / count - 1 < row < (part + 1) * tokens / count for part, row in enumerate(rows.host))
    if tokens >= 8 * ROWS:
        assert len(set(rows.host) & set(sample_rows(layer, step + 1, tokens, CPU).host)) < count / 8


@pytest.mark.parametrize(("kind", "keep"), [("random", 0.25), ("structured", 0.0625)])
def test_the_error_of_sampled_rows_is_that_of_all_rows(kind: str, keep: float) -> None:
    """Within 15 % in 9 of 10 steps, 128 of 3,840 rows and 8 heads."""
    q, k, v = drawn(kind, 1)
    exact, tiles = SDPA(q, k, v), make_tiles(GRID, 32, CPU)
    state = SparseForward(KERNELS["math"], (SDPA,), tiles, (Rule(keep),), samples=(noted := Noted()).samples())
    out = state.attend(AttentionCall(0), q, k, v)
    everything = squares(out, exact)
    true = float((everything[0].sum() / everything[1].sum()).sqrt())
    assert noted.error() == pytest.approx(true, rel=0.1)
    ratios = []
    for step in range(40):
        rows = sample_rows(0, step, q.shape[1], CPU).here
        sums = squares(out[:, rows], exact[:, rows]).sum(1)
        ratios.append(float((sums[0] / sums[1]).sqrt()) / true)
    assert sum(abs(one - 1) < 0.15 for one in ratios) >= 36
    assert abs(sum(ratios) / len(ratios) - 1) < 0.03


@pytest.mark.parametrize("grid", [(4, 8, 8), (3, 5, 7)])  # the last block full, and not
def test_finished_rows_are_rows_of_what_is_finished(grid: tuple[int, int, int]) -> None:
    q, k, v = drawn("random", 0, grid, 3)
    kernel = SparseKernel("fp8", "", lambda: whole_block_kernel, fp8=True, any_block=True)
    tiles = make_tiles(grid, 16, CPU)
    state = SparseForward(kernel, (math_fp8(),), tiles, (Rule(0.4),))
    queries, keys = quantize_heads_first(q, 16), quantize_heads_first(k, 16, key_mean(k))
    out, lse, how = state._read_fp8(Rule(0.4), queries, keys, quantize_values(v.flatten(-2), 3, 16))
    rows = torch.tensor([0, 3, 17, 40, q.shape[1] - 1])
    finished = finished_rows(out, lse, queries.data, rows, 16, **how)
    torch.testing.assert_close(
        finished, finish(out, lse, queries.data.float(), 16, **how)[:, rows], rtol=1e-4, atol=1e-5
    )


def test_an_fp8_kernel_is_compared_before_it_rounds() -> None:
    """Reading everything has an error of nearly nothing, though both outputs are in FP8; less is the error of plain
    numbers."""
    q, k, v = drawn("structured", 2, (4, 16, 16))
    kernel = SparseKernel("fp8", "", lambda: whole_block_kernel, fp8=True, any_block=True)
    tiles, values = make_tiles((4, 16, 16), 32, CPU), quantize_values(v.flatten(-2), 8, 32)
    blocked = quantize_heads_first(q, 32), quantize_heads_first(k, 32, key_mean(k)), values
    for keep in (1.0, 0.125):
        rounded, plain = Noted(), Noted()
        how = {"tiles": tiles, "rules": (Rule(keep),)}
        fp8 = SparseForward(kernel, (math_fp8(),), samples=rounded.samples(), **how)
        fp8.attend_fp8(AttentionCall(0), *blocked)
        wide = [x.data.float() * x.scale for x in blocked]
        SparseForward(KERNELS["math"], (SDPA,), samples=plain.samples(), **how).attend(AttentionCall(0), *wide)
        difference, output = rounded.sums[0].sum(1).tolist()
        assert abs(difference / output - plain.error() ** 2) < 0.006**2 + 0.01 * plain.error() ** 2
        assert (plain.error() < 1e-5) == (keep == 1)


def test_the_rounding_of_e4m3_and_rows_of_bytes() -> None:
    x = torch.randn(4, 3000, generator=torch.Generator().manual_seed(0))
    rounded = x.to(FP8)
    ratio = float((rounded.float() - x).square().sum() / rounding_of(rounded).sum())
    assert ratio == pytest.approx(1, rel=0.1)
    rows = torch.tensor([5, 7])
    assert torch.equal(taken(rounded, rows).float(), rounded.float()[:, rows])
    assert isinstance(quantize_heads_first(torch.randn(1, 20, 2, 16), 8), Blocked)

"""Attention in pieces is that in one call, with something called before each piece."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan_core.ops.attention import parts
from wan_core.ops.attention.parts import InPieces, heads_in_pieces
from wan_core.ops.attention.sdpa import SDPA


@given(
    queries=st.integers(1, 70), keys=st.integers(1, 70), heads=st.integers(1, 3), most=st.sampled_from((1, 500, 4000))
)
def test_the_result_is_that_of_one_call(queries: int, keys: int, heads: int, most: int) -> None:
    calls: list[int] = []
    generator = torch.Generator().manual_seed(queries * keys)
    q, k, v = (torch.randn(2, length, heads, 8, generator=generator) for length in (queries, keys, keys))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MOST", most)
        attend = InPieces(SDPA, lambda: calls.append(1))
        length = parts.piece_length(2 * heads * 8, keys)
        torch.testing.assert_close(attend(q, k, v), SDPA(q, k, v), atol=1e-5, rtol=1e-5)
        assert len(calls) == -(-queries // length)
        for actual, expected in zip(attend.with_lse(q, k, v), SDPA.with_lse(q, k, v), strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        turned = [one.transpose(1, 2) for one in (q, k, v)]
        plain = torch.nn.functional.scaled_dot_product_attention
        torch.testing.assert_close(
            heads_in_pieces(plain, lambda: calls.append(1))(*turned), plain(*turned), atol=1e-5, rtol=1e-5
        )
    assert attend.gives_lse and len(calls) == 3 * -(-queries // length)


def test_what_is_called_between_ends_it() -> None:
    """After a piece, not after all of them."""
    done: list[int] = []

    def between() -> None:
        done.append(1)
        if len(done) == 3:
            raise KeyboardInterrupt

    q = torch.randn(1, 64, 1, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "MOST", 2 * 8 * 64 * 4)
        with pytest.raises(KeyboardInterrupt):
            InPieces(SDPA, between)(q, q, q)
    assert len(done) == 3

"""The rule of bounded sparse attention, on layers that are functions: levels, first steps, what it keeps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_core.ops.attention.sparse.routing import Rule
from wan_core.sampling.sparsity.bounds import (
    AGAIN,
    DOWN,
    LEVELS,
    SECOND,
    Shares,
    log_odds,
    relative_error,
    run_words,
    usable_levels,
)

BOUNDS = (0.03, 0.06, 0.12)
Layer = Callable[[int, float], float]
"""(step, share) -> the error that is measured there."""


def walk(
    bound: float, layers: list[Layer], steps: int, floor: float = 0.0
) -> tuple[list[list[float]], list[list[float]]]:
    """Shares and errors of every step and layer; 0 where a layer reads everything."""
    rule = Shares(bound, 591, floor)
    shares: list[list[float]] = []
    errors: list[list[float]] = []
    for step in range(steps):
        before = [errors[-1][n] if shares[-1][n] < 1 else None for n in range(len(layers))] if shares else None
        row = [rule.choose(n, step, before[n] if before else None) for n in range(len(layers))]
        shares.append(row)
        errors.append([0.0 if share == 1 else layer(step, share) for share, layer in zip(row, layers, strict=True)])
    return shares, errors


def drawn_layer(seed: int, jumps: bool) -> Layer:
    """An error that falls along its own curve, changes slowly from step to step, and is measured to 5 %. jumps: in some
    steps it becomes another."""
    draw = random.Random(seed)
    slope, half = draw.uniform(0.4, 1.6), math.exp(draw.uniform(math.log(0.002), math.log(0.04)))
    drift, noise = draw.uniform(0.97, 1.03), random.Random(seed + 1)
    factors = [1.0 if not jumps or n < 12 else draw.choice((0.5, 1, 2)) for n in range(4)]

    def error(step: int, share: float) -> float:
        factor = drift**step * (factors[step // 12 % 4] if jumps else 1.0)
        return half * factor * math.exp(-slope * log_odds(share)) * noise.gauss(1, 0.05)

    return error


@given(st.sampled_from(BOUNDS), st.integers(0, 1000), st.booleans())
def test_the_bound_is_kept_and_not_much_more_is_read_than_it_needs(bound: float, seed: int, jumps: bool) -> None:
    layers = [drawn_layer(1000 * seed + n, jumps) for n in range(40)]
    shares, errors = walk(bound, layers, 40)
    late = [error for row in errors[2:] for error in row]
    assert all(sum(row) / len(row) <= bound for row in errors)
    assert sum(error <= 1.5 * bound for error in late) >= 0.95 * len(late)
    spared = [error for share, error in zip(shares[-1], errors[-1], strict=True) if LEVELS[0] < share < 1]
    assert not spared or sum(spared) / len(spared) > 0.4 * bound


def test_first_steps_and_how_fast_a_layer_goes_down() -> None:
    shares, _ = walk(0.06, [lambda step, share: 1e-4, lambda step, share: 10.0], 8)
    assert shares[0] == [1, 1] and shares[1] == [SECOND, SECOND]
    places = [LEVELS.index(row[0]) for row in shares[1:]]
    assert [max(0, places[0] - DOWN * n) for n in range(7)] == places
    assert [row[1] for row in shares[2:]] == [1] * 6  # far from the bound: not tried again
    assert min(row[0] for row in walk(0.06, [lambda step, share: 0.0], 8, floor=0.25)[0]) == 0.25


def test_a_layer_goes_up_as_far_as_needed_and_tries_again_where_it_was_close() -> None:
    def jump(step: int, share: float) -> float:
        return 0.01 if step < 4 else 0.5 if step < 6 else 0.065 * math.exp(-0.1 * log_odds(share))

    shares = [row[0] for row in walk(0.06, [jump], 20)[0]]
    assert shares[4] < SECOND < shares[5]  # what a step measured counts in the next
    near = [row[0] for row in walk(0.06, [lambda step, share: 0.07], 14)[0]]
    assert near[2] == 0.75 and near[3] == 1 and near[3 : 3 + AGAIN + 1] == [*[1] * AGAIN, 0.75]


def test_the_same_numbers_give_the_same_shares() -> None:
    assert walk(0.06, [drawn_layer(n, True) for n in range(9)], 30) == walk(
        0.06, [drawn_layer(n, True) for n in range(9)], 30
    )


@pytest.mark.parametrize("blocks", [1, 2, 5, 16, 45, 256, 591])
def test_levels_are_different_numbers_of_blocks(blocks: int) -> None:
    levels = usable_levels(blocks)
    counts = [Rule(share).most(blocks) for share in levels]
    assert counts == sorted(set(counts)) and levels[-1] == 1 and counts[-1] == blocks
    assert set(counts) == {Rule(share).most(blocks) for share in LEVELS}


def test_errors_of_sums() -> None:
    assert relative_error(4.0, 100.0) == 0.2 and relative_error(-1e-9, 1.0) == 0 == relative_error(1.0, 0.0)
    assert relative_error(math.nan, 1.0) == math.inf
    rule = Shares(0.06, 64)
    assert [rule.choose(0, 0), rule.choose(0, 1), rule.choose(0, 2, math.inf), rule.choose(0, 3)] == [1, SECOND, 1, 1]
    rows = [{"shares": [1.0, 1.0], "errors": [None, None]}, {"shares": [0.5, 1.0], "errors": [0.02, None]}]
    assert run_words(rows, 0.06) == "attention read 88 % of the keys, error 0.01 of 0.06"

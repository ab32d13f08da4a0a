"""Sparse attention over gloo: every mesh computes what one rank computes."""

from __future__ import annotations

import math

import pytest
import torch

from tests.parallel.equal_ranks import ROUNDING, SPARSE, together


def test_sparse_attention_of_tokens_beside_the_video_equals_one_rank(ranks):
    for error, counts in ranks.ask("sparse_sound", mesh="2x1x2"):
        assert error < ROUNDING and counts > 1e-4


def test_sparse_fp8_attention_takes_numbers_as_they_arrive(ranks, alone):
    """They arrive in FP8, which on a CPU one rank would not use: no further from the truth than both changes together,
    and the same on every rank."""
    request, options = {"steps": 4, "sparse": SPARSE}, {"attention": "math-fp8"}
    answers = together(ranks, mesh="1x1x2", request=request, **options)
    assert all(torch.equal(answer[0], answers[0][0]) for answer in answers)
    dense = alone(request={"steps": 4})[0]
    changes = alone(request=request)[0], alone(request={"steps": 4}, **options)[0]

    def distance(latents: torch.Tensor) -> float:
        return float((latents - dense).norm() / dense.norm())

    assert distance(answers[0][0]) < 1.5 * math.hypot(*map(distance, changes))


@pytest.mark.parametrize(
    "options",
    [
        {"grid": (3, 5, 7), "block": 4},  # 27 blocks, the last of one token
        {"grid": (5, 6, 7), "block": 8, "heads": 4, "fp8": True},
        {"grid": (5, 6, 7), "block": 8, "slope": False},
    ],
    ids=["quarter", "fp8", "means"],
)
def test_sparse_attention_of_ranks_that_share_heads_is_that_of_one(ranks, options):
    assert max(ranks.ask("sparse_attention", mesh="1x1x3", **options)) < ROUNDING


@pytest.mark.parametrize("attention", ["sdpa", "math-fp8"])
def test_a_sparse_forward_with_frames_of_their_own_timesteps(ranks, attention):
    """Shards end at pieces of a frame; behind FP8 attention all that is exchanged is rounded to 3 bits, which on a CPU
    one rank's sparse attention is not."""
    options = {"mesh": "1x1x4", "attention": attention, "grid": (5, 12, 14), "apart": True}
    for whole, sharded in ranks.ask("sparse_forward", **options):
        assert whole < ROUNDING and sharded < (ROUNDING if attention == "sdpa" else 8e-3)


@pytest.mark.parametrize("attention", ["math", "math-fp8"])
def test_what_a_sparse_forward_exchanges_and_chooses(ranks, attention):
    """A sparse exchange carries as many bytes as a dense one: no block is filled up before an exchange. Each rank
    chooses once a layer, for its own heads: none is chosen for twice."""
    grid, layers, heads = (5, 7, 8), 2, 4
    answers = ranks.ask("sparse_counts", mesh="1x1x4", attention=attention, tokens=grid)
    blocks = -(-math.prod(grid) // answers[0]["block"])
    assert sum(answer["sparse"][2] for answer in answers) == layers * heads * blocks
    for answer in answers:
        assert answer["dense"][1:] == (0, 0) and answer["sparse"][1] == layers
        assert answer["sparse"][0] == answer["dense"][0]

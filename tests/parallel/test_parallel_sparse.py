"""Sparse attention over gloo: every mesh computes what one rank computes."""

from __future__ import annotations

import math

import parallel_checks
import pytest
import torch

from tests.parallel.equal_ranks import MAGCACHE, ROUNDING, SPARSE, TALL, equal_on_all, together
from wan_core.parallel.mesh import Mesh


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


@pytest.mark.parametrize("mesh", ["1x3x1", "1x3bx1", "1x2x2"])
@pytest.mark.parametrize(
    "options",
    [
        {"grid": (3, 5, 7), "block": 4},  # 27 blocks, the last of one token
        {"grid": (5, 6, 7), "block": 4, "keep": 0.06},  # many rows read nothing of some rank
        {"grid": (5, 6, 7), "block": 8, "heads": 4, "fp8": True},
        {"grid": (5, 6, 7), "block": 8, "slope": False},
    ],
    ids=["quarter", "few", "fp8", "means"],
)
def test_sparse_attention_over_a_ring_is_that_of_one_rank(ranks, mesh, options):
    answers = ranks.ask("sparse_attention", mesh=mesh, **options)
    assert max(error for error, _ in answers) < ROUNDING
    assert "keep" not in options or all(unread > 0 for _, unread in answers)


@pytest.mark.parametrize(
    ("mesh", "request_"),
    [
        ("1x3x1", {"steps": 10, "sparse": SPARSE, "magcache": MAGCACHE}),
        ("1x2x2", {"steps": 4, "sparse": SPARSE, **TALL}),
    ],
    ids=["magcache", "another size"],
)
def test_sparse_trajectories_over_a_ring(ranks, alone, mesh, request_):
    """Two blocks may be worth the same but for rounding, and then one rank reads the one and three ranks the other, on
    whatever mesh: such a seed is told by a small difference, and another one is taken."""
    for seed in (5, 4, 6):
        request = {**request_, "seed": seed}
        answers, wanted = together(ranks, mesh=mesh, request=request), alone(request=request)
        error = parallel_checks.relative(answers[0][0], wanted[0])
        assert error < 2e-2
        if error < ROUNDING:
            break
    equal_on_all(answers, wanted)
    assert parallel_checks.relative(alone(request={**request, "sparse": None})[0], wanted[0]) > 5e-2


@pytest.mark.parametrize(("mesh", "attention"), [("1x2x1", "sdpa"), ("1x2x2", "math-fp8")])
def test_a_sparse_forward_with_frames_of_their_own_timesteps(ranks, mesh, attention):
    """Shards end at blocks and at pieces of a frame; behind FP8 attention all that is exchanged is rounded to 3 bits,
    which on a CPU one rank's sparse attention is not: 7.5e-3 is measured on either mesh."""
    options = {"mesh": mesh, "attention": attention, "grid": (5, 12, 14), "apart": True}
    for whole, sharded in ranks.ask("sparse_forward", **options):
        assert whole < ROUNDING and sharded < (ROUNDING if attention == "sdpa" else 8e-3)


@pytest.mark.parametrize("attention", ["math", "math-fp8"])
@pytest.mark.parametrize("mesh", ["1x1x4", "1x4x1", "1x2x2"])
def test_what_a_sparse_forward_exchanges_and_chooses(ranks, mesh, attention):
    """A sparse exchange carries as many bytes as a dense one: no block is filled up before an exchange. Each rank
    chooses once a layer, for its own heads or rows: none is chosen for twice. A ring also exchanges the means of its
    blocks, and each row's share."""
    grid, layers, heads = (5, 7, 8), 2, 4
    answers = ranks.ask("sparse_counts", mesh=mesh, attention=attention, tokens=grid)
    size, split = answers[0]["block"], Mesh.parse(mesh)
    blocks, mine = -(-math.prod(grid) // size), heads // split.ulysses
    means, share = 4 * mine * -(-blocks // split.ring) * 16, mine * blocks  # and variances, of keys and values
    assert sum(answer["sparse"][2] for answer in answers) == layers * heads * blocks
    for answer in answers:
        assert answer["dense"][1:] == (0, 0) and answer["sparse"][1] == layers
        assert answer["sparse"][0] - answer["dense"][0] == layers * 4 * (split.ring - 1) * (means + share)

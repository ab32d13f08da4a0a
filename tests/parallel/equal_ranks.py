"""What tests of ranks compare: what all of them make of a request, and what one makes."""

from __future__ import annotations

import parallel_checks
import torch

ROUNDING = 3e-5  # of the largest latent, over eight blocks and several steps
MAGCACHE = {"threshold": 0.3, "max_skips": 2, "retention": 0.2}


def together(ranks, **options):
    """What every rank makes of a request but for its pictures, which are most of the work and the first test's."""
    return ranks.ask("trajectory", decode=False, **options)


def equal_on_all(answers, wanted, rounding: float = ROUNDING) -> None:
    """The same bits on every rank, and one rank's result but for rounding."""
    for latents, frames, _ in answers:
        assert torch.equal(latents, answers[0][0]) and torch.equal(frames, answers[0][1])
    assert parallel_checks.relative(answers[0][0], wanted[0]) < rounding
    if len(wanted[1]):
        assert int((answers[0][1].int() - wanted[1].int()).abs().max()) <= 1


SPARSE = {"sparsity": 0.75, "ramp": 0.0}
SQUARE = {"width": 80, "height": 80}
TALL = {"width": 80, "height": 112, "frames": 9}

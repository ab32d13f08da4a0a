"""Ranks of a test file, and what one rank makes of a request."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the ranks import their checks by these names, and so must we
import parallel_checks
from parallel_ranks import Ranks


@pytest.fixture(scope="module")
def ranks():
    started = Ranks(6)
    yield started
    started.close()


@pytest.fixture(scope="module")
def alone():
    """What one rank makes of a request, made once."""
    trajectories: dict[str, tuple[torch.Tensor, torch.Tensor, dict]] = {}

    def find(**options):
        options = {"decode": False, **options}
        key = repr(options)
        if key not in trajectories:
            trajectories[key] = parallel_checks.trajectory(None, **options)
        return trajectories[key]

    return find

"""Worker processes that the tests of a file share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.forked import forking
from tests.workers.running_workers import MESH, SMALL, TIMEOUTS, TINY, all_of, run
from tools.processes import wait_until_gone
from wan_core.config import (
    Request,
)
from wan_core.pipeline.pipeline import Pipeline
from wan_core.workers.launcher import Workers
from wan_core.workers.options import WorkerOptions


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One pair for all tests. If a test ended it, the first request of the next one starts it again."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**20))  # freed memory goes back to the system
    with Workers(WorkerOptions(devices=("cpu", "cpu"), mesh=MESH, **TIMEOUTS)) as started:
        assert run(started).frames.shape == (5, 48, 48, 3)
        with forking():
            yield started
        processes = all_of(started) if started.is_running else set()
    wait_until_gone(processes)


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    """The latents of SMALL from one process."""
    return Pipeline.load(TINY).generate(Request(**SMALL)).latents

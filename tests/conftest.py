"""What every test file shares: threads, hypothesis profiles, the `gpu` marker, the embedded model's folder."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import torch

# A deadline measures the machine, not the code. CI draws the same examples every time: a failure there can be repeated.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("ci" if "CI" in os.environ else "local")


def pytest_configure(config: pytest.Config) -> None:
    """Small tensors lose time on many threads; under xdist each worker is a core's worth already."""
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def tiny_assets() -> Path:
    """The folder of the embedded model, `wan_core/assets/tiny`."""
    return Path(__file__).resolve().parents[1] / "wan_core" / "assets" / "tiny"

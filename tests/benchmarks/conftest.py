"""What the tests of the benchmarks share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True)
def imports_are_no_garbage() -> None:
    """A suite collects garbage before each row, and most objects are those of libraries that tests before imported."""
    gc.freeze()

"""Setups of the benchmark by their spelling."""

from __future__ import annotations

import pytest

from benchmarks.setups import find_setup


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp8/sdpa", ("fp8", "sdpa", "triton", "off")),
        ("plain/math/torch", ("plain", "math", "torch", "off")),
        ("fp8/flash4/compile", ("fp8", "flash4", "triton", "blocks")),
    ],
)
def test_spellings(name: str, expected: tuple[object, ...]) -> None:
    setup = find_setup(name)
    assert (setup.precision, setup.attention, setup.kernels, setup.compile) == expected

"""Runs of ComfyUI's samplers that are no plain guided ones, in a ComfyUI on a CPU: `native_odd_runs` has the checks."""

from __future__ import annotations

import pytest

from tests.comfyui import find_newer_comfyui, what_checks_found

pytestmark = pytest.mark.comfy
CHECKS = ("dual_guidance", "rising", "counts", "slopes", "plans", "no_curve")


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return what_checks_found("native_odd_runs.py", find_newer_comfyui())


@pytest.mark.parametrize("name", CHECKS)
def test_an_odd_run(found: dict[str, str], name: str) -> None:
    assert not found[name], found[name]


def test_all_checks_are_listed(found: dict[str, str]) -> None:
    assert sorted(found) == sorted(CHECKS)

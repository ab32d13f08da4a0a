"""The resolution schedule on ComfyUI's own Wan models, in a real ComfyUI's process on a CPU: `native_resolutions` has
the checks."""

from __future__ import annotations

import pytest

from tests.comfyui import find_newer_comfyui, what_checks_found

pytestmark = pytest.mark.comfy
CHECKS = ("full_size", "engine", "variants", "together", "sparse", "reuse", "shown")


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return what_checks_found("native_resolutions.py", find_newer_comfyui())


@pytest.mark.parametrize("name", CHECKS)
def test_resolution_schedule(found: dict[str, str], name: str) -> None:
    assert not found[name], found[name]

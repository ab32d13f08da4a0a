"""Step caching on ComfyUI's own Wan models, in a real ComfyUI's process on a CPU: `native_caches` has the checks."""

from __future__ import annotations

import pytest

from tests.comfyui import find_newer_comfyui, what_checks_found

pytestmark = pytest.mark.comfy
CHECKS = (
    "never", "one_model", "two_experts", "variants", "windows", "faults", "image_to_image", "samplers", "conditions",
    "memory", "preview", "pose_cache",
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return what_checks_found("native_caches.py", find_newer_comfyui())


@pytest.mark.parametrize("name", CHECKS)
def test_step_cache(found: dict[str, str], name: str) -> None:
    assert not found[name], found[name]


def test_all_checks_are_listed(found: dict[str, str]) -> None:
    assert sorted(found) == sorted(CHECKS)

"""WanCore Accelerate beside other nodes on one MODEL, in a real ComfyUI's process on a CPU: `native_beside` has the
checks."""

from __future__ import annotations

import pytest

from tests.comfyui import find_newer_comfyui, what_checks_found

pytestmark = pytest.mark.comfy
CHECKS = (
    "override_before", "backend_before", "override_behind", "sparse_node", "easycache", "memory_plan", "containers",
    "new_replacements", "compiled_fun_control", "compiled", "nothing_arrives",
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    return what_checks_found("native_beside.py", find_newer_comfyui())


@pytest.mark.parametrize("name", CHECKS)
def test_beside(found: dict[str, str], name: str) -> None:
    assert not found[name], found[name]


def test_all_checks_are_listed(found: dict[str, str]) -> None:
    assert sorted(found) == sorted(CHECKS)

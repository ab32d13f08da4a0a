"""What other nodes put on a MODEL or into its conditions, beside WanCore Accelerate, in a real ComfyUI's process on a
CPU: `native_extras` and `native_passes` have the checks."""

from __future__ import annotations

import pytest

from tests.comfyui import find_newer_comfyui, what_checks_found

pytestmark = pytest.mark.comfy
CHECKS = {
    "native_extras.py": ("positions", "inputs", "sampling", "uni3c", "control_lora", "dtype"),
    "native_passes.py": ("passes", "guiders", "texts"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, str]]:
    checkout = find_newer_comfyui()
    return {script: what_checks_found(script, checkout) for script in CHECKS}


@pytest.mark.parametrize(("script", "name"), [(script, name) for script, names in CHECKS.items() for name in names])
def test_other_nodes(found: dict[str, dict[str, str]], script: str, name: str) -> None:
    assert not found[script][name], found[script][name]


def test_all_checks_are_listed(found: dict[str, dict[str, str]]) -> None:
    assert {script: tuple(names) for script, names in found.items()} == CHECKS

"""Nodes with what others give in unusual forms, most of it as float16, in a real ComfyUI's process on a CPU:
`half_inputs` has the checks."""

from __future__ import annotations

import pytest

from tests.comfyui import find_comfyui, printed_by

pytestmark = pytest.mark.comfy
CHECKS = ("image_to_video", "text_to_video", "pictures", "driven", "numbers_that_are_none", "models_in_results")


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return printed_by("half_inputs.py", find_comfyui())


@pytest.mark.parametrize("name", CHECKS)
def test_float16_is_as_float32(failures: dict[str, str], name: str) -> None:
    assert not failures[name], failures[name]


def test_all_checks_are_listed(failures: dict[str, str]) -> None:
    assert sorted(failures) == sorted(CHECKS)

"""The plan of a MODEL with ComfyUI's context windows against what its sampler runs, on tiny models on the CPU.

`native_windows.py` runs in ComfyUI's Python, once for all of these tests.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.comfyui import find_newer_comfyui, printed_by
from tests.nodes.native_windows import PLANS

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    return printed_by("native_windows.py", find_newer_comfyui())


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_for_ksampler_counts_each_window(compared: dict[str, Any], name: str) -> None:
    planned, blind, ran = compared["plans"][name]
    assert re.search(rf", {ran}( of \d+)? forwards", planned[0]), (planned, ran)
    assert any("context windows" in line for line in planned)
    assert any("context windows are not counted: connect a latent" in line for line in blind)
    assert ("saved" in planned[0]) == (name == "static, a cache")
    assert any("off: context windows" in line for line in planned) == (name == "uniform, a cache")

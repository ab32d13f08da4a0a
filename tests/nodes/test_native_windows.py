"""Context windows against ComfyUI's own: tiny models of its classes, its sampler and its node, on the CPU.

`native_windows.py` runs in ComfyUI's Python, once for all of these tests.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.comfyui import find_newer_comfyui, printed_by
from tests.nodes.native_windows import CASES, PLANS

pytestmark = pytest.mark.comfy
ALONE = "t2v one window"


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    return printed_by("native_windows.py", find_newer_comfyui())


@pytest.mark.parametrize("name", [name for name in CASES if name != ALONE])
def test_latents_are_those_of_comfyuis_sampler(compared: dict[str, Any], name: str) -> None:
    run = compared["runs"][name]
    assert run["error"] <= 2e-6 < 1e-3 < run["changes"] and run["windows"][0] > 1
    assert run["moves"] == ("uniform" in name or "looped" in name)


def test_one_window_changes_nothing(compared: dict[str, Any]) -> None:
    run = compared["runs"][ALONE]
    assert run["error"] <= 2e-6 and run["changes"] == 0 and run["windows"] == [0]


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_for_ksampler_counts_each_window(compared: dict[str, Any], name: str) -> None:
    planned, blind, ran = compared["plans"][name]
    assert re.search(rf", {ran}( of \d+)? forwards", planned[0]), (planned, ran)
    assert any("context windows" in line for line in planned)
    assert any("context windows are not counted: connect a latent" in line for line in blind)
    assert ("saved" in planned[0]) == (name == "static, a cache")
    assert any("off: context windows" in line for line in planned) == (name == "uniform, a cache")


def test_windows_and_weights_of_every_size(compared: dict[str, Any]) -> None:
    assert compared["different"] == 0

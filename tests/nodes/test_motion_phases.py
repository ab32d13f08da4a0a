"""Preset motion against three KSampler (Advanced) of ComfyUI: `motion_phases` has the runs."""

from __future__ import annotations

import pytest

from tests.comfyui import find_comfyui, printed_by

pytestmark = pytest.mark.comfy


def test_three_phases_are_three_samplers() -> None:
    found = printed_by("motion_phases.py", find_comfyui())
    assert found["merge"] < 1e-5 and found["attach"] < 1e-5, found
    assert found["without the phase"] > 0.01, found

"""Preset motion against three KSampler (Advanced) of ComfyUI: `motion_phases` has the runs."""

from __future__ import annotations

import pytest

from tests.comfyui import find_comfyui, printed_by

pytestmark = pytest.mark.comfy


def test_three_phases_are_three_samplers() -> None:
    errors = printed_by("motion_phases.py", find_comfyui())
    assert errors["merge"] < 1e-5 and errors["attach"] < 1e-5, errors
    assert errors["without the phase"] > 0.01, errors

"""ComfyUI's official S2V template with WanCore Sampler, on tiny random weights: what ComfyUI's own sampler makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.comfyui import find_newer_comfyui
from tools.templates.run import Templates
from tools.templates.sampled import differences

pytestmark = [pytest.mark.comfy, pytest.mark.slow]


def test_the_clips_of_the_sound_template_equal_comfyuis(tmp_path: Path) -> None:
    try:
        templates = Templates(find_newer_comfyui(), tmp_path)
    except FileNotFoundError as fault:
        pytest.skip(str(fault))
    try:
        found = differences(templates, "video_wan2_2_14B_s2v")
    finally:
        templates.stop()
    assert len(found) == 3 and max(found.values()) < 1e-3, found

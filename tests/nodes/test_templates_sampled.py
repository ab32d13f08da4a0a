"""ComfyUI's official templates with WanCore Sampler, on tiny random weights: what ComfyUI's own sampler makes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.templates.run import OWN, Templates
from benchmarks.templates.sampled import differences
from tests.comfyui import find_newer_comfyui

pytestmark = [pytest.mark.comfy, pytest.mark.slow]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Templates]:
    try:
        made = Templates(find_newer_comfyui(), tmp_path_factory.mktemp("comfyui"))
    except FileNotFoundError as fault:
        pytest.skip(str(fault))
    yield made
    made.stop()


def test_the_clips_of_the_sound_template_equal_comfyuis(templates: Templates) -> None:
    found = differences(templates, "video_wan2_2_14B_s2v")
    assert len(found) == 3 and max(found.values()) < 1e-3, found


@pytest.mark.parametrize("name", OWN)
def test_a_controlled_video_equals_comfyuis(templates: Templates, name: str) -> None:
    """VACE, Fun control, inpaint and camera; two experts in one sampler."""
    found = differences(templates, name)
    assert len(found) == 1 and max(found.values()) < 1e-3, found

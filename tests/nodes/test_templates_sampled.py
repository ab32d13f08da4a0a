"""ComfyUI's official templates with WanCore Sampler, on tiny random weights: what ComfyUI's own sampler makes."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import pytest

from benchmarks.comfy_graphs import with_defaults
from benchmarks.comfyui import Graph
from benchmarks.measure import relative_error
from benchmarks.templates.our_sampler import OURS, with_our_sampler
from benchmarks.templates.run import TEMPLATES, Templates, observed
from tests.comfyui import find_newer_comfyui

pytestmark = [pytest.mark.comfy, pytest.mark.slow]
OWN = [name for name in TEMPLATES if "vace" in name or "_fun_" in name]


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Templates]:
    try:
        server = Templates(find_newer_comfyui(), tmp_path_factory.mktemp("comfyui"))
    except FileNotFoundError as fault:
        pytest.skip(str(fault))
    yield server
    server.stop()


def comparable(graph: Graph) -> Graph:
    """The graph with what both compute alike. Euler's steps: ComfyUI's UniPC is another solver than the reference's. A
    sound that never changes: ComfyUI has no copies of its first frame in front, so its tokens hear other frames.
    Weights as their files have them: WanCore from MODEL reads these, whatever ComfyUI's loader makes of them."""
    nodes = deepcopy(graph)
    changes = {
        "KSampler": {"sampler_name": "euler"},
        "KSamplerAdvanced": {"sampler_name": "euler"},
        "UNETLoader": {"weight_dtype": "default"},
        "StandInAudio": {"steady": True},
    }
    for one in nodes.values():
        one["inputs"] |= changes.get(one["class_type"], {})
    return nodes


def with_motion_positions(graph: Graph) -> Graph:
    """ComfyUI's positions of motion frames in every WanCore Sampler, where a model has any."""
    nodes = deepcopy(graph)
    if any(one["class_type"].startswith("WanSoundImageToVideo") for one in graph.values()):
        for one in nodes.values():
            one["inputs"] |= {"motion_positions": "comfyui"} if one["class_type"] == OURS else {}
    return nodes


def differences(templates: Templates, name: str) -> dict[str, float]:
    """How far the latents of every sampler are from the native run's, relative to those. Raises AssertionError where
    one does not run."""
    graph = comparable(templates.graph(name))
    own = observed(with_motion_positions(with_our_sampler(graph)), "own")
    for run, prompt in (("native", observed(graph, "native")), ("own", with_defaults(own, templates.info))):
        done = templates.server.run(prompt)
        assert done.ok, f"{name}, {run}: {done.status}"
    native = templates.kept("native")
    return {sampler: relative_error(latents, native[sampler]) for sampler, latents in templates.kept("own").items()}


def test_the_clips_of_the_sound_template_equal_comfyuis(templates: Templates) -> None:
    errors = differences(templates, "video_wan2_2_14B_s2v")
    assert len(errors) == 3 and max(errors.values()) < 1e-3, errors


@pytest.mark.parametrize("name", OWN)
def test_a_controlled_video_equals_comfyuis(templates: Templates, name: str) -> None:
    """VACE, Fun control, inpaint and camera; two experts in one sampler."""
    errors = differences(templates, name)
    assert len(errors) == 1 and max(errors.values()) < 1e-3, errors

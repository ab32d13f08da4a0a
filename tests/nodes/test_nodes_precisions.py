"""FP8 and compiled models in a running ComfyUI: what comes out, what its memory manager is told, what is refused."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.comfyui import ComfyUI, Graph, Refused, Run
from tests.nodes.comfy_files import LOOK, assert_comes_true, facts_of, looked_at, make_ti2v
from tools.embedded_graphs import node, small, text_to_video

pytestmark = pytest.mark.comfy
SCALES = 0.02  # share of the embedded model's weights, which are counted without them

PACKS = {"look": LOOK}


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    make_ti2v(base)


@pytest.fixture(scope="module")
def comfy(comfy: ComfyUI) -> ComfyUI:
    comfy.get("/object_info/Look")  # which registers the backend
    return comfy


def with_loader(graph: Graph, **inputs: Any) -> Graph:
    graph["model"]["inputs"] |= inputs
    return graph


def in_pictures(**inputs: Any) -> Graph:
    """A small graph that saves pictures, because a video's encoder makes much of the last bit."""
    graph = with_loader(small(seed=21, guidance_mode="batched"), **inputs)
    graph.pop("video")
    return graph | {"save": node("SaveImage", images=["decode", 0], filename_prefix="same")}


def pixels(comfy: ComfyUI, run: Run) -> np.ndarray:
    files = [comfy.output_file(run, "save", index) for index in range(len(run.outputs["save"]["images"]))]
    return np.stack([np.asarray(Image.open(file), dtype=int) for file in files])


def test_fp8_makes_the_video_that_was_asked_for_and_says_that_it_is_fp8(comfy: ComfyUI) -> None:
    graph = looked_at(with_loader(text_to_video(), precision="fp8"))
    graph |= {"report": node("WanCoreReport", report=["decode", 1])}
    graph |= {"words": node("PreviewAny", source=["report", 1])}
    run = comfy.run(graph)
    facts = facts_of(run)
    assert_comes_true(comfy.output_file(run, "save"))
    assert "blocks in fp8" in run.outputs["model"]["text"][0]
    assert "precision: high fp8, low fp8" in run.outputs["words"]["text"][0]
    matrices = 2 * 8 * (8 * 128 * 128 + 2 * 128 * 384)  # two experts of 8 blocks
    assert facts["fp8"] == matrices
    assert facts["loaded"] == facts["told"] == pytest.approx(facts["bytes"], rel=SCALES)


def test_blocks_that_are_kept_are_not_quantised(comfy: ComfyUI) -> None:
    [whole, partly] = [
        facts_of(comfy.run(looked_at(with_loader(small(), precision="fp8", keep_blocks=count)))) for count in (0, 2)
    ]
    assert partly["fp8"] == whole["fp8"] / 2  # 4 of 8 blocks are between them
    assert partly["told"] == pytest.approx(partly["bytes"], rel=SCALES) and partly["told"] > whole["told"]


def evict_all(comfy: ComfyUI) -> None:
    """Asked for more than once: ComfyUI hears nothing while it cleans up after a prompt."""
    before = comfy.log().count("WanCore evicted")
    deadline = time.monotonic() + 30
    while comfy.log().count("WanCore evicted") == before:
        assert time.monotonic() < deadline, "nothing was evicted"
        comfy.post("/free", {"unload_models": True})
        time.sleep(0.2)


def test_fp8_is_the_same_after_it_left_the_device_and_came_back(comfy: ComfyUI) -> None:
    graph = in_pictures(precision="fp8")
    first = pixels(comfy, comfy.run(graph))
    evict_all(comfy)
    graph["sampler"]["inputs"]["shift"] = 5.0  # the model's own: the same, and yet not cached
    assert np.abs(pixels(comfy, comfy.run(graph)) - first).max() <= 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: torch compiles nothing for a CPU")
def test_a_compiled_model_comes_back_without_another_compilation(comfy: ComfyUI) -> None:
    graph = looked_at(in_pictures(precision="fp8", compile="blocks"))
    run = comfy.run(graph)
    compiled = facts_of(run)["graphs"]
    assert compiled > 0 and "compiled" in run.outputs["model"]["text"][0]
    first = pixels(comfy, run)
    plain = comfy.run(in_pictures(precision="fp8", compile="off"))
    # Sums in another order, where FP8 makes a step of 6 % of some last bits: half of what FP8 changes by itself.
    assert np.abs(pixels(comfy, plain) - first).mean() < 6

    for size in ({"width": 64, "frames": 9}, {"width": 48, "frames": 5}):
        evict_all(comfy)
        graph["size"]["inputs"] |= size
        run = comfy.run(graph)
        assert facts_of(run)["graphs"] == compiled
    assert np.abs(pixels(comfy, run) - first).max() <= 1


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"precision": "te-current"}, "NVIDIA GPU"),
        ({"precision": "fp4"}, "fp8-weights"),
        ({"keep_blocks": 1}, "quantises nothing"),
        ({"precision": "fp8", "keep_blocks": 4}, "0 to 3 are possible"),
        ({"precision": "fp8", "keep_blocks": -1}, "from 0 to 20"),
        ({"attention": "cudnn-fp8"}, "NVIDIA GPU"),
        ({"attention": "odd"}, "head dim of 96, this model has 64"),
        ({"compile": "everything"}, "everything"),
    ],
)
def test_what_cannot_be_is_refused_at_the_loader(comfy: ComfyUI, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refused:
        comfy.queue(with_loader(small(), **inputs))
    assert set(refused.value.errors) == {"model"}
    assert message in json.dumps(refused.value.errors["model"]["errors"])
    assert len(refused.value.errors["model"]["errors"]) == 1

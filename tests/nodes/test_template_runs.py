"""Every template that needs files makes a video in a running ComfyUI, on tiny random weights under the files' names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.comfyui import Graph
from benchmarks.templates.expand import expand
from benchmarks.templates.run import Templates, observed
from tests.comfyui import ComfyUI, find_newer_comfyui
from tests.nodes.test_workflows import BOXES, on_cpu_workers
from tests.nodes.workflow_pages import api_form, page_form
from tests.pipeline.test_sound_clips import write_wav
from tests.stand_ins import TRANSFORMERS, WRITERS
from tools.workflows import all_nodes, files_of, known_files
from wan_core.media.mp4 import write_mp4
from wan_core.media.video import read_video

pytestmark = [pytest.mark.comfy, pytest.mark.slow]
NATIVE = "wan22_i2v_accelerate"  # on ComfyUI's own loaders
SIDE, FRAMES, STEPS = 64, 9, 2
SIZES = {"width": SIDE, "height": SIDE, "frames": FRAMES, "length": FRAMES, "duration": 0.0, "steps": STEPS}
PADS = ("left", "top", "right", "bottom")
SPOKEN = TRANSFORMERS["s2v"]
# In the place of AudioEncoderEncode, whose encoder has one size only.
STATES = f"""
import torch
class States:
    CATEGORY, FUNCTION, RETURN_TYPES = "test", "run", ("AUDIO_ENCODER_OUTPUT",)
    @classmethod
    def INPUT_TYPES(cls):
        return {{"required": {{}}}}
    def run(self):
        rows = torch.randn({SPOKEN.audio_layers}, 1, 99, {SPOKEN.audio_dim}, generator=torch.Generator().manual_seed(1))
        return ({{"encoded_audio_all_layers": list(rows), "audio_samples": 32000}},)
NODE_CLASS_MAPPINGS = {{"States": States}}
"""


PACKS = {"states": STATES}


@pytest.fixture(scope="module")
def files(base: Path) -> dict[str, str]:
    folders = {name: one.folder for name, one in known_files().items()}
    for name in {
        file for box in BOXES if box != NATIVE for node in all_nodes(page_form(box)) for file in files_of(node)
    }:
        path = base / "models" / folders[name] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        WRITERS[folders[name]](path)
    draw = np.random.default_rng(1)
    Image.fromarray(draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)).save(base / "input" / "example.png")
    write_mp4(base / "input" / "example.mp4", draw.integers(0, 256, (FRAMES, SIDE, SIDE, 3), dtype=np.uint8), fps=24)
    write_wav(base / "input" / "example.mp3", 2.0)
    return {"WANCORE_ALLOW_CPU_WORKERS": "1"}


def smaller(graph: Graph) -> Graph:
    """At a few steps, pixels and frames; the sound encoder's result from a node of ours."""
    nodes: dict[str, Any] = {}
    for key, one in on_cpu_workers(graph).items():
        kind, inputs = one["class_type"], dict(one["inputs"])
        if kind == "AudioEncoderEncode":
            kind, inputs = "States", {}
        elif kind == "CLIPVisionLoader":  # ComfyUI's own has one size
            kind, inputs = "WanCoreVisionLoader", {"clip_vision": inputs["clip_name"]}
        elif kind == "ImagePadForOutpaint":
            inputs |= dict.fromkeys(PADS, 0)
        elif kind != "ImageFromBatch":
            inputs |= {name: value for name, value in SIZES.items() if isinstance(inputs.get(name), int)}
        if inputs.get("preset") == "motion":
            inputs["steps"] = 0  # its three phases need its own steps
        if inputs.get("keyframe_numbers"):
            inputs["keyframe_numbers"] = "4"
        if "prompts" in inputs:
            inputs["prompts"] = inputs["prompts"].replace("\n40:", "\n4:")
        nodes[key] = {"class_type": kind, "inputs": inputs}
    return {key: one for key, one in nodes.items() if one["class_type"] != "AudioEncoderLoader"}


@pytest.mark.parametrize("name", [name for name in BOXES if name != NATIVE])
def test_it_makes_a_video(comfy: ComfyUI, name: str) -> None:
    graph = smaller(api_form(name))
    run = comfy.run(graph)
    assert run.ok, run.status
    [saved] = (key for key, one in graph.items() if one["class_type"] == "SaveVideo")
    frames = read_video(comfy.output_file(run, saved))
    assert frames.shape[1:] == (SIDE, SIDE, 3) and len(frames) >= FRAMES and frames.std() > 0


def test_accelerate_stands_before_both_samplers(tmp_path: Path) -> None:
    """In the template of ComfyUI's own nodes; with its exact settings the latents are the same but for rounding."""
    try:
        server = Templates(find_newer_comfyui(), tmp_path)
    except FileNotFoundError as fault:
        pytest.skip(str(fault))
    try:
        graph = server.runnable(expand(page_form(NATIVE), server.info), "video_wan2_2_14B_i2v")
        fast = [key for key, one in graph.items() if one["class_type"] == "WanCoreAccelerate"]
        plain = json.loads(json.dumps(graph))
        for one in plain.values():
            if (source := one["inputs"].get("model")) and source[0] in fast:
                one["inputs"]["model"] = graph[source[0]]["inputs"]["model"]
        latents = []
        for run, variant in (("fast", graph), ("plain", plain)):
            done = server.server.run(observed(variant, run))
            assert done.ok, done.status
            latents.append([*server.kept(run).values()])
        assert len(fast) == len(latents[0]) == 2
        assert server.server.log().count("WanCore Accelerate:") >= 2
        for one, other in zip(*latents, strict=True):
            assert one.isfinite().all() and (one - other).abs().max() <= 1e-5 * other.abs().max()
    finally:
        server.stop()

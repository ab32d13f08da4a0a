"""Absurd values of widgets, given over the API to a ComfyUI that may take 12 GB: each is refused in a sentence within
seconds, before anything of that size is made, and the server goes on."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.comfyui import ComfyUI, Graph, Refused
from tools.embedded_graphs import loaders, node, sampler, small
from tools.processes import memory_of

pytestmark = [pytest.mark.comfy, pytest.mark.skipif(sys.platform != "linux", reason="limits a process's memory")]
LIMIT = 12 * 10**9
SECONDS = 5.0  # usual is a tenth of one; models of the embedded kind are read in it, too
HEARD = """
import torch
class Heard:
    RETURN_TYPES, FUNCTION, CATEGORY = ("AUDIO_ENCODER_OUTPUT",), "make", "test"
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}
    def make(self):
        return ({"encoded_audio_all_layers": [torch.zeros(1, 400, 64)] * 3, "audio_samples": 400 * 320},)
NODE_CLASS_MAPPINGS = {"Heard": Heard}
"""


def sized(width: int, height: int, frames: int, **more: Any) -> dict[str, Any]:
    return {"width": width, "height": height, "frames": frames, **more}


TEXT = {"positive": ["text", 0], "negative": ["text", 1]}
PICTURES: Graph = {
    "picture": node("LoadImage", image="first.png"),
    "heard": node("Heard"),
}
LINKS: dict[str, dict[str, Any]] = {  # of each node that makes something of the size that its widgets say
    "WanCoreEmptyLatent": {"latent_type": "Wan 2.1 VAE (A14B, tiny)"},
    "WanCoreImageToVideo": {**TEXT, "vae": ["vae", 0], "first_image": ["picture", 0]},
    "WanCoreVACE": {**TEXT, "vae": ["vae", 0], "strength": 1.0, "control_video": ["picture", 0]},
    "WanCoreCamera": {"camera": "zoom-in"},
    "WanCoreAnimate": {
        **TEXT,
        "vae": ["vae", 0],
        "reference_image": ["picture", 0],
        "pose_video": ["picture", 0],
        "face_video": ["picture", 0],
    },
    "WanCoreAnimate2": {**TEXT, "vae": ["vae", 0], "reference_image": ["picture", 0], "pose_video": ["picture", 0]},
    "WanCoreSoundToVideo": {
        **TEXT,
        "vae": ["vae", 0],
        "audio_encoder_output": ["heard", 0],
        "reference_image": ["picture", 0],
        "pose_video": ["picture", 0],
    },
}
SIZES = [
    ("WanCoreEmptyLatent", sized(8192, 8192, 1001)),
    ("WanCoreEmptyLatent", sized(8192, 8192, 4001, batch_size=64, latent_type="Wan 2.2 VAE (TI2V-5B)")),
    ("WanCoreImageToVideo", sized(8192, 8192, 1001)),
    ("WanCoreVACE", sized(8192, 8192, 81)),
    ("WanCoreCamera", sized(1024, 1024, 4001)),
    ("WanCoreAnimate", sized(1024, 1024, 401)),
    ("WanCoreAnimate2", sized(8192, 8192, 81)),
    ("WanCoreSoundToVideo", sized(1024, 1024, 4001)),
]
NUMBERS = [  # of other nodes of the graph: node, inputs
    ("sampler", {"seed": 2**70}),
    ("decode", {"tiling": 10**30}),
    ("size", {"width": 2**63}),
    ("model", {"keep_blocks": 10**12}),
]
BESIDE: dict[str, Graph] = {  # nodes beside the graph, of which the last is read
    "launcher mesh": {"last": node("WanCoreLauncher", devices="cpu,cpu", mesh="99999x99999x99999", start_timeout=60,
                                   step_timeout=60)},
    "magcache": {"last": node("WanCoreSkipping", cache="magcache", threshold=1e30, max_skips=10**9)},
    "taylorseer": {"last": node("WanCoreSkipping", cache="taylorseer", interval=10**9)},
    "lora strength": {"last": node("WanCoreLoRA", model=["model", 0], high="none", strength_high=1e30, low="none",
                                   strength_low=1.0)},
}  # fmt: skip
CORE = {"width": 2048, "height": 2048, "length": 641, "batch_size": 1}  # latents of a node of ComfyUI's own


def with_core_latents(reader: str) -> Graph:
    graph = {**loaders(), "core": node("EmptyHunyuanLatentVideo", **CORE)}
    if reader == "sampler":
        graph["last"] = sampler(steps=2, latent=["core", 0])
    elif reader == "decode":
        graph["last"] = node("WanCoreVAEDecode", vae=["vae", 0], latent=["core", 0], tiling="always")
    else:
        graph["core"]["inputs"] |= {"width": 16384, "height": 64, "length": 1}
        graph["last"] = node(
            "WanCoreDecodeToVideo", vae=["vae", 0], latent=["core", 0], fps=1000.0, encoder="fast", tiling="auto"
        )
    return graph | {"end": node("PreviewAny", source=["last", 0])}


def graphs() -> dict[str, Graph]:
    made: dict[str, Graph] = {}
    for kind, inputs in SIZES:
        graph = {**loaders(), **PICTURES, "sized": node(kind, **LINKS[kind] | inputs)}
        made[f"{kind} {' '.join(map(str, inputs.values()))}"] = graph | {"end": node("PreviewAny", source=["sized", 0])}
    for name, inputs in NUMBERS:
        graph = small()
        graph[name] = {**graph[name], "inputs": graph[name]["inputs"] | inputs}
        made[f"{name} {inputs}"] = graph
    for name, nodes in BESIDE.items():
        made[name] = {**loaders(), **nodes, "end": node("PreviewAny", source=["last", 0])}
    made |= {f"core latents, {reader}": with_core_latents(reader) for reader in ("sampler", "decode", "video")}
    card = {"model": ["model", 0], "clip": ["encoder", 0], "vae": ["vae", 0], "prompts": "", "with_prompts": False}
    made["card"] = {**loaders(), "card": node("WanCoreReportCard", **card, **sized(8192, 8192, 81), steps=0, seed=0)}
    return made


GRAPHS = graphs()
RAW = ("allocate", "Traceback", "NoneType", "object has no attribute", "overflow", "out of range for")


PACKS = {"heard": HEARD}


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    Image.fromarray(np.full((48, 48, 3), 90, np.uint8)).save(base / "input" / "first.png")


@pytest.fixture(scope="module")
def comfy(comfy: ComfyUI) -> ComfyUI:
    assert comfy.run(small()).ok
    resource.prlimit(comfy.process.pid, resource.RLIMIT_AS, (LIMIT, LIMIT))
    return comfy


@pytest.mark.parametrize("name", GRAPHS)
def test_an_absurd_value_is_refused_in_a_sentence(comfy: ComfyUI, name: str) -> None:
    begin, before = time.perf_counter(), memory_of(comfy.process.pid)
    try:
        run = comfy.run(GRAPHS[name])
    except Refused as refused:
        errors = [error for one in refused.errors.values() for error in one["errors"]]
        said = [f"{error['message']}: {error['details']}" for error in errors]
    else:
        assert not run.ok, "it ran"
        said = [run.message("execution_error")["exception_message"]]
    seconds = time.perf_counter() - begin
    assert all(len(one) > 20 and not any(word in one for word in RAW) for one in said), said
    assert seconds < SECONDS, f"{seconds:.1f} s: {said}"
    made = 2 * 2**30 if name.startswith("core latents") else 2**28
    assert comfy.process.poll() is None and memory_of(comfy.process.pid) < before + made
    peak = next(line for line in Path(f"/proc/{comfy.process.pid}/status").read_text().splitlines() if "VmHWM" in line)
    assert int(peak.split()[1]) * 1024 < 4 * 2**30, peak
    print(f"{name}: {seconds:.2f} s: {said}")


def test_the_server_works_as_before(comfy: ComfyUI) -> None:
    assert comfy.run(small(seed=5)).ok

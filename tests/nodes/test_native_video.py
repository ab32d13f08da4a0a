"""WanCore Decode to Video with ComfyUI's own Load VAE in a running ComfyUI: what may happen to a run, and the next one
is right."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.comfyui import Client, Graph, python_of
from benchmarks.templates import files
from tests.comfyui import ComfyUI, find_newer_comfyui, make_base
from tests.nodes.test_nodes_video import packets, temporary
from tools.embedded_graphs import node
from wan_core.media.video import read_video

pytestmark = pytest.mark.comfy
FRAMES, SIDE = 33, 128
LATENTS = f"""
import torch
class RandomLatents:
    CATEGORY, FUNCTION, RETURN_TYPES = "test", "run", ("LATENT",)
    @classmethod
    def INPUT_TYPES(cls):
        return {{"required": {{"seed": ("INT", {{"default": 0}})}}}}
    def run(self, seed):
        shape = 1, 16, {(FRAMES - 1) // 4 + 1}, {SIDE // 8}, {SIDE // 8}
        return ({{"samples": 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))}},)
NODE_CLASS_MAPPINGS = {{"RandomLatents": RandomLatents}}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkout, folder = find_newer_comfyui(), make_base(tmp_path_factory.mktemp("comfyui"), {"latents": LATENTS})
    vae = folder / "models" / "vae" / "wan_2.1_vae.safetensors"
    vae.parent.mkdir(parents=True)
    command = [python_of(checkout), files.__file__, str(checkout), json.dumps({str(vae): "vae"})]
    subprocess.run(command, check=True, capture_output=True, cwd=checkout)
    return folder


@pytest.fixture(scope="module")
def comfy(base: Path) -> Iterator[ComfyUI]:
    server = ComfyUI(find_newer_comfyui(), base)
    yield server
    server.stop()


def graph(seed: int) -> Graph:
    decoded = {"vae": ["vae", 0], "latent": ["latent", 0], "fps": 16.0, "encoder": "as Save Video", "tiling": "auto"}
    saved = {"video": ["video", 0], "filename_prefix": "native", "format": "auto", "codec": "auto"}
    return {
        "vae": node("VAELoader", vae_name="wan_2.1_vae.safetensors"),
        "latent": node("RandomLatents", seed=seed),
        "video": node("WanCoreDecodeToVideo", **decoded),
        "save": node("SaveVideo", **saved),
    }


def video_of(comfy: ComfyUI, seed: int) -> list[bytes]:
    run = comfy.run(graph(seed))
    assert run.ok and not temporary(comfy), run.status
    path = comfy.output_file(run, "save")
    assert read_video(path).shape == (FRAMES, SIDE, SIDE, 3)
    return packets(path)


def test_models_are_freed_and_temporary_files_deleted_between_two_runs(comfy: ComfyUI) -> None:
    first = video_of(comfy, 1)
    video_of(comfy, 2)  # so that the cache has another one
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    shutil.rmtree(comfy.base / "temp", ignore_errors=True)
    assert video_of(comfy, 1) == first


def test_an_interruption_in_the_middle_of_decoding_leaves_nothing(comfy: ComfyUI) -> None:
    whole = video_of(comfy, 3)
    client = Client(comfy.port)
    queued = comfy.queue(graph(4), client.name)
    seen = []
    for event in client.events():
        if event["type"] == "progress" and event["data"]["node"] == "video" and not seen:
            comfy.post("/interrupt", {})
            seen.append(event["data"])
        if event["type"] in ("execution_interrupted", "execution_success", "execution_error"):
            break
    client.close()
    assert event["type"] == "execution_interrupted" and seen[0]["value"] < seen[0]["max"] == FRAMES
    assert not comfy.wait(queued).ok and not temporary(comfy)
    comfy.post("/free", {"unload_models": False, "free_memory": True})
    assert video_of(comfy, 3) == whole


def test_a_full_disk_is_an_error_and_no_file(comfy: ComfyUI) -> None:
    room = comfy.log_path.stat().st_size + 60_000
    unlimited = resource.prlimit(comfy.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(comfy.process.pid, resource.RLIMIT_FSIZE, (room, unlimited[1]))
    try:
        run = comfy.run(graph(5))
    finally:
        resource.prlimit(comfy.process.pid, resource.RLIMIT_FSIZE, unlimited)
    assert not run.ok and "File too large" in json.dumps(run.status) and not temporary(comfy)
    video_of(comfy, 5)


def test_a_run_that_waits_while_another_saves(comfy: ComfyUI) -> None:
    queued = [comfy.queue(graph(seed)) for seed in (6, 7)]
    runs = [comfy.wait(one) for one in queued]
    paths = [comfy.output_file(run, "save") for run in runs]
    assert packets(paths[0]) != packets(paths[1]) and paths[0] != paths[1]
    assert packets(paths[1]) == video_of(comfy, 7)


def test_equal_frames_are_encoded_once_also_after_models_were_freed(comfy: ComfyUI) -> None:
    made = {"vae": node("VAELoader", vae_name="wan_2.1_vae.safetensors")}
    made["faster"] = node("WanCoreAccelerateVAE", vae=["vae", 0])
    made["frames"] = node("EmptyImage", width=64, height=64, batch_size=21, color=0x3080C0)
    for name in ("vae", "faster"):
        made[f"{name} latents"] = node("VAEEncode", pixels=["frames", 0], vae=[name, 0])
        made[f"save {name}"] = node("SaveLatent", samples=[f"{name} latents", 0], filename_prefix=name)
    for _ in range(2):
        run = comfy.run(made)
        assert run.ok, run.status
        files = (comfy.output_file(run, f"save {name}") for name in ("vae", "faster"))
        native, ours = (load_file(file)["latent_tensor"] for file in files)
        assert native.shape == (1, 16, 6, 8, 8) and (ours - native).abs().max() <= 1e-5 * native.abs().max()
        comfy.post("/free", {"unload_models": True, "free_memory": True})

"""In a running ComfyUI: parts of a schedule, video to video, NAG, batches, several first frames, the moving preview,
and the workflows made of ComfyUI's own templates."""

from __future__ import annotations

import json
import secrets
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.comfyui import Client, ComfyUI, Graph, saved_latents
from tests.nodes.workflow_pages import api_form
from tools.embedded_graphs import TINY_I2V, loaders, node, sampler
from wan_core.checkpoint.save import write_safetensors
from wan_core.pipeline.sources import TINY

pytestmark = pytest.mark.comfy
SIZE = {"width": 48, "height": 48, "frames": 9}
FPS = 8  # of the embedded model
FEW = {"steps": 6, "guidance_high": 3.0, "guidance_low": 3.0}


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    """With the embedded models and random LoRAs under the names that ComfyUI's templates give."""
    for task, version in (("i2v", "1"), ("t2v", "1.1")):
        for expert in ("high", "low"):
            copy(base, TINY / f"{task}_{expert}.safetensors", f"wan2.2_{task}_{expert}_noise_14B_fp8_scaled")
            name = f"wan2.2_{task}_lightx2v_4steps_lora_v{version}_{expert}_noise"
            write_lora(base, name, load_file(TINY / f"{task}_{expert}.safetensors")["blocks.0.ffn.0.weight"])
    copy(base, TINY / "text_encoder.safetensors", "umt5_xxl_fp8_e4m3fn_scaled", "text_encoders")
    copy(base, TINY / "vae.safetensors", "wan_2.1_vae", "vae")
    Image.new("RGB", (64, 64), (200, 30, 40)).save(base / "input" / "example.png")


def copy(base: Path, file: Path, name: str, folder: str = "diffusion_models") -> None:
    shutil.copy(file, base / "models" / folder / f"{name}.safetensors")


def write_lora(base: Path, name: str, weight: torch.Tensor) -> None:
    down, up = torch.full((2, weight.shape[1]), 0.02), torch.full((weight.shape[0], 2), 0.02)
    block = "diffusion_model.blocks.0.ffn.0"
    tensors = {f"{block}.lora_down.weight": down, f"{block}.lora_up.weight": up}
    write_safetensors(tensors, base / "models" / "loras" / f"{name}.safetensors", {})


def graph(**nodes: Any) -> Graph:
    size = node("WanCoreEmptyLatent", **SIZE, latent_type="Wan 2.1 VAE (A14B, tiny)")
    return {**loaders(), "size": size, "sampler": sampler(**FEW), **nodes}


def latents(comfy: ComfyUI, nodes: Graph, of: str = "sampler") -> torch.Tensor:
    kept = node("SaveLatent", samples=[of, 0], filename_prefix="kept")
    return saved_latents(comfy, {**nodes, "kept": kept})


def refusal(comfy: ComfyUI, nodes: Graph, of: str = "sampler") -> str:
    run = comfy.run({**nodes, "kept": node("SaveLatent", samples=[of, 0], filename_prefix="kept")})
    assert not run.ok
    return run.message("execution_error")["exception_message"]


@pytest.mark.parametrize("solver", ["unipc", "heun"])
def test_two_samplers_in_a_row_give_what_one_gives(comfy: ComfyUI, solver: str) -> None:
    whole = latents(comfy, graph(sampler=sampler(**FEW, solver=solver)))
    first = sampler(**FEW, solver=solver, end_step=2, return_with_leftover_noise="enable")
    settings = {**FEW, "solver": solver, "start_step": 2, "latent": ["first", 0]}
    both = graph(first=first, sampler=sampler(**settings, add_noise="disable"))
    assert torch.equal(latents(comfy, both), whole)
    assert "disable add_noise here" in refusal(comfy, graph(first=first, sampler=sampler(**settings)))


def test_video_to_video_stays_nearer_the_weaker_it_is(comfy: ComfyUI) -> None:
    before = latents(comfy, graph())
    far = []
    for denoise in (0.2, 0.5, 0.8):
        again = sampler(**FEW, seed=5, denoise=denoise, latent=["sampler", 0])
        weakened = latents(comfy, graph(again=again), "again")
        far.append((weakened - before).norm().item())
    assert far[0] < far[1] < far[2]
    again = sampler(**FEW, latent=["sampler", 0])
    assert "lower denoise" in refusal(comfy, graph(again=again), "again")
    assert "they are empty" in refusal(comfy, graph(sampler=sampler(**FEW, denoise=0.5)))


def test_sigmas_of_a_scheduler_node(comfy: ComfyUI) -> None:
    schedule = node("KarrasScheduler", steps=5, sigma_max=1.0, sigma_min=0.05, rho=7.0)
    settings = {"sigmas": ["schedule", 0], "solver": "res_multistep", "guidance_high": 1.0, "guidance_low": 1.0}
    plan = node("WanCorePlanPreview", model=["model", 0], sigmas=["schedule", 0])
    scheduled = graph(schedule=schedule, sampler=sampler(**settings), plan=plan)
    scheduled["table"] = node("PreviewAny", source=["plan", 1])
    assert latents(comfy, scheduled).isfinite().all()
    assert "5 steps, res_multistep" in comfy.run(scheduled).outputs["table"]["text"][0]
    assert "leave the steps out" in refusal(comfy, graph(schedule=schedule, sampler=sampler(**settings | {"steps": 4})))


def test_nag_counts_at_guidance_1_and_is_refused_where_it_would_not(comfy: ComfyUI) -> None:
    few = {"steps": 4, "guidance_high": 1.0, "guidance_low": 1.0, "solver": "euler"}
    texts = node(
        "WanCoreTextEncode",
        clip=["encoder", 0],
        positive="a red circle moving right on a blue background",
        negative="a green square moving up on a white background",
    )
    nag = node("WanCoreNAG", negative=["text", 1], scale=11.0, tau=2.5, alpha=0.25)
    plain = latents(comfy, graph(text=texts, sampler=sampler(**few)))
    with_nag = graph(text=texts, nag=nag, sampler=sampler(**few, negative=["nag", 0]))
    assert (latents(comfy, with_nag) - plain).norm() > 0.01 * plain.norm()
    guided = graph(text=texts, nag=nag, sampler=sampler(**FEW, negative=["nag", 0]))
    assert "every step has guidance" in refusal(comfy, guided)
    other = graph(text=texts, nag=nag, sampler=sampler(**few, positive=["nag", 0]))
    assert "wancore_nag" in refusal(comfy, other)


def test_a_batch_and_one_video_of_it(comfy: ComfyUI) -> None:
    size = node("WanCoreEmptyLatent", **SIZE, latent_type="Wan 2.1 VAE (A14B, tiny)", batch_size=3)
    both = latents(comfy, graph(size=size))
    assert both.shape[0] == 3 and not torch.allclose(both[0], both[1])
    second = graph(
        size=size,
        second=node("LatentFromBatch", samples=["size", 0], batch_index=1, length=1),
        sampler=sampler(**FEW, latent=["second", 0]),
    )
    torch.testing.assert_close(latents(comfy, second), both[1:2], rtol=1e-3, atol=1e-3)


def test_several_first_frames(comfy: ComfyUI) -> None:
    """What is known of the video is its first five frames; none but them is."""
    nodes = {
        **loaders(TINY_I2V, TINY_I2V),
        "frames": node("EmptyImage", width=64, height=64, batch_size=5, color=0xE03020),
        "image": node("WanCoreImageToVideo", positive=["text", 0], negative=["text", 1], vae=["vae", 0], **SIZE,
                      first_image=["frames", 0], batch_size=2),
        "sampler": sampler(**FEW, positive=["image", 0], negative=["image", 1], latent=["image", 2]),
    }  # fmt: skip
    assert latents(comfy, nodes).shape[:3] == (2, 16, 3)
    nodes["frames"]["inputs"]["batch_size"] = 10
    assert "10 known frames given for a video of 9" in refusal(comfy, nodes)


# ------------------------------------------------------------------------------------------------------------ templates


def of_kind(nodes: Graph, kind: str) -> dict[str, Any]:
    [inputs] = [one["inputs"] for one in nodes.values() if one["class_type"] == kind]
    return inputs


@pytest.mark.parametrize("name", ["wan22_i2v_4_steps", "wan22_t2v_4_steps", "wan22_i2v_first_last_frame"])
def test_the_template_s_graph_with_its_switch(comfy: ComfyUI, name: str) -> None:
    nodes, plans = api_form(name), {}
    kind = "WanCoreEmptyLatent" if name == "wan22_t2v_4_steps" else "WanCoreImageToVideo"
    of_kind(nodes, kind).update(SIZE | {"duration": 0.0})
    [key] = [key for key, one in nodes.items() if one["class_type"] == "WanCoreSampler"]
    switches = [one for one in nodes.values() if one["class_type"] == "ComfySwitchNode"]
    for on in (False, True)[: 1 + len(switches)]:
        for switch in switches:
            switch["inputs"]["switch"] = on
        run = comfy.run(nodes)
        assert run.ok, run.message("execution_error")["exception_message"]
        plans[on] = run.outputs[key]["text"][0]
    assert "20 steps, euler" in plans[False] and "(10 high-noise, 10 low-noise), 40 forwards" in plans[False]
    if switches:
        assert "4 steps, euler, shift 5" in plans[True] and "(2 high-noise, 2 low-noise), 4 forwards" in plans[True]


# -------------------------------------------------------------------------------------------------------------- preview


class Page(Client):
    """A client that says, as ComfyUI's page does, that it knows which node a preview is of."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        text = json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": True}}).encode()
        mask = secrets.token_bytes(4)
        assert len(text) < 126
        masked = bytes(byte ^ mask[n % 4] for n, byte in enumerate(text))
        self.socket.sendall(struct.pack(">BB", 0x81, 0x80 | len(text)) + mask + masked)


def test_the_preview_moves(comfy: ComfyUI) -> None:
    """Between two steps a page gets several pictures, which differ; after the node none."""
    page = Page(comfy.port)
    large = node("WanCoreEmptyLatent", width=192, height=192, frames=33, latent_type="Wan 2.1 VAE (A14B, tiny)")
    steps = 16
    nodes = graph(size=large, sampler=sampler(**{**FEW, "steps": steps}, seed=77))
    prompt = comfy.queue(
        {**nodes, "kept": node("SaveLatent", samples=["sampler", 0], filename_prefix="kept")}, page.name
    )
    pictures, times, running, after = [], [], "", 0
    for event in page.events():
        if event["type"] == "executing":
            running = event["data"]["node"] or ""
            if not running:
                break
        if event["type"] == "preview":
            pictures.append(event["data"])
            times.append(time.monotonic())
            after += running == "kept"
    page.close()
    assert comfy.wait(prompt).ok
    moved = (times[-1] - times[0]) * FPS / 4  # so many latent frames a second, beside the picture of every step
    assert len(pictures) >= steps + moved * 0.7 - 1 > steps and len(set(pictures)) > steps and after == 0

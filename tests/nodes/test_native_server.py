"""WanCore Accelerate in a running ComfyUI: graphs of ComfyUI's own nodes with it in them, through the API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.comfyui import ComfyUI, Graph, Run, find_newer_comfyui, make_base
from tests.nodes.comfy_files import MAGCACHE
from tools.embedded_graphs import CAPTION, TINY, node
from wan_core.checkpoint.random import random_module
from wan_core.models.wan.config import DiTConfig

pytestmark = pytest.mark.comfy
EXPERTS = ("high.safetensors", "low.safetensors")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experts of Wan 2.2 T2V in miniature, as ComfyUI recognises them, with the embedded text encoder's width."""
    server_base = make_base(tmp_path_factory.mktemp("native"))
    folder = server_base / "models" / "diffusion_models"
    folder.mkdir(parents=True)
    config = DiTConfig(
        in_channels=16, out_channels=16, dim=256, ffn_dim=256, num_heads=2, num_layers=2, text_dim=64, text_len=512
    )
    metadata = {"config": json.dumps({"transformer": {"text_dim": 64}})}
    for seed, name in enumerate(EXPERTS):
        weights = random_module(config, device=torch.device("cpu"), dtype=torch.float32, seed=seed).state_dict()
        save_file({key: value.contiguous() for key, value in weights.items()}, folder / name, metadata)
    return server_base


@pytest.fixture
def comfy(base: Path) -> Iterator[ComfyUI]:
    server = ComfyUI(find_newer_comfyui(), base)
    yield server
    server.stop()


def graph(accelerate: dict[str, Any] | None, seed: int = 1, length: int = 17) -> Graph:
    """Two experts, two KSamplerAdvanced; accelerate: inputs of the node, None: without it."""
    nodes = {
        "encoder": node("WanCoreTextEncoderLoader", text_encoder=TINY, precision="checkpoint"),
        "text": node("WanCoreTextEncode", clip=["encoder", 0], positive=CAPTION, negative=""),
        "size": node("EmptyHunyuanLatentVideo", width=96, height=64, length=length, batch_size=1),
    }
    latent = ["size", 0]
    for index, expert in enumerate(EXPERTS):
        nodes[f"load{index}"] = node("UNETLoader", unet_name=expert, weight_dtype="default")
        nodes[f"shift{index}"] = node("ModelSamplingSD3", model=[f"load{index}", 0], shift=8.0)
        model = [f"shift{index}", 0]
        if accelerate is not None:
            nodes[f"fast{index}"] = node("WanCoreAccelerate", model=model, **accelerate)
            model = [f"fast{index}", 0]
        nodes[f"sample{index}"] = node(
            "KSamplerAdvanced", model=model, add_noise="disable" if index else "enable", noise_seed=seed, steps=4,
            cfg=3.0, sampler_name="euler", scheduler="simple", positive=["text", 0], negative=["text", 1],
            latent_image=latent, start_at_step=2 * index, end_at_step=2 + 2 * index,
            return_with_leftover_noise="disable" if index else "enable",
        )  # fmt: skip
        latent = [f"sample{index}", 0]
    nodes["save"] = node("SaveLatent", samples=latent, filename_prefix="native")
    return nodes


def latents(comfy: ComfyUI, run: Run) -> torch.Tensor:
    assert run.ok, run.status
    return load_file(comfy.output_file(run, "save"))["latent_tensor"]


EXACT = {"speed": "exact", "attention": "auto"}
SPARSE = {"speed": "balanced", "attention": "auto"}


def test_a_graph_of_two_experts_with_the_node_in_it(comfy: ComfyUI) -> None:
    plain = latents(comfy, comfy.run(graph(None)))
    watched = comfy.watch(graph(EXACT))
    fast = latents(comfy, watched)
    assert (fast - plain).abs().max() <= 1e-5 * plain.abs().max()
    for expert in "01":
        [text] = [e["data"] for e in watched.events if e["type"] == "text" and e["node"] == f"fast{expert}"]
        # With and without guidance in one forward or two, as the memory that is free allows.
        assert re.fullmatch(
            r"[\d.]+ s a step; attention by sdpa\ncompare 'on' shows in the next run what was gained\n(?:next: .*\n)?"
            r"WanCore Accelerate: self-attention calls: ([48]) by sdpa; left to ComfyUI: \1 cross-attention calls",
            text,
        )
        assert watched.outputs[f"fast{expert}"]["text"] == ["attention: sdpa"]
    assert comfy.log().count(text.splitlines()[-1]) == 2
    watched = comfy.watch(graph(SPARSE))
    sparse = latents(comfy, watched)
    assert (sparse - plain).abs().max() > 1e-3 * plain.abs().max()
    said = [e["data"] for e in watched.events if e["type"] == "text" and e["node"] == "fast1"]
    assert "speed balanced: sparse 0.5" in said[0] and "skipped" not in said[0]
    assert comfy.run(graph(SPARSE)).cached


def test_a_word_in_20_steps_skips_forwards(comfy: ComfyUI) -> None:
    nodes = graph(SPARSE)
    for index in range(2):
        steps = {"steps": 20, "start_at_step": 10 * index, "end_at_step": 10 + 10 * index}
        nodes[f"sample{index}"]["inputs"] |= steps
    watched = comfy.watch(nodes)
    latents(comfy, watched)
    for expert in "01":
        [text] = [e["data"] for e in watched.events if e["type"] == "text" and e["node"] == f"fast{expert}"]
        assert re.search(r"\d+ of (10|20) forwards skipped", text), text
        assert "step cache (speed balanced): " in text and "speed balanced: taylorseer 2/0.7" in text
        assert "left out: speed balanced" in watched.outputs[f"fast{expert}"]["text"][0]


def test_a_run_of_ten_steps_is_compared_once(comfy: ComfyUI) -> None:
    """The first run of a model and a size says what was gained; the next one only what a step took."""
    nodes, said = graph(EXACT), []
    for seed in (11, 12):
        for index in range(2):
            steps = {"steps": 10, "start_at_step": 5 * index, "end_at_step": 5 + 5 * index, "noise_seed": seed}
            nodes[f"sample{index}"]["inputs"] |= steps
        watched = comfy.watch(nodes)
        latents(comfy, watched)
        said += [e["data"] for e in watched.events if e["type"] == "text" and e["node"] == "fast1"]
    first, second = said
    assert re.match(r"[\d.]+ s instead of [\d.]+ s for 5 steps, by one without WanCore; nothing changed but r", first)
    assert re.match(r"[\d.]+ s a step; attention by sdpa\n", second) and "compare" not in second


def test_prompts_in_a_row_equal_fresh_servers(base: Path, comfy: ComfyUI) -> None:
    """Other sizes, seeds and settings before a prompt change nothing of it."""
    prompts = [graph(SPARSE, seed=3, length=9), graph(EXACT, seed=4), graph(SPARSE, seed=5)]
    row = [latents(comfy, comfy.run(prompt)) for prompt in prompts]
    comfy.stop()
    fresh = ComfyUI(find_newer_comfyui(), base)
    try:
        for prompt, expected in zip(reversed(prompts), reversed(row), strict=True):
            assert torch.equal(latents(fresh, fresh.run(prompt)), expected)
    finally:
        fresh.stop()


def test_a_plan_has_the_settings_of_both_samplers(comfy: ComfyUI) -> None:
    """The plan of two models has the settings of the KSamplers that take them; the task's own count where no sampler
    does, and what says nothing of a MODEL's run is refused."""
    models = {"model": ["fast0", 0], "model_low": ["fast1", 0], "latent": ["size", 0]}
    prompt = graph(SPARSE) | {"plan": node("WanCorePlanPreview", **models)}
    run = comfy.run(prompt)
    assert run.ok, run.status
    assert "4 steps" in run.outputs["plan"]["text"][0] and "2 high-noise, 2 low-noise" in run.outputs["plan"]["text"][0]
    alone = {name: one for name, one in prompt.items() if name.startswith(("load", "shift", "fast", "size", "plan"))}
    run = comfy.run(alone)
    assert run.ok and "20 high-noise, 20 low-noise" in run.outputs["plan"]["text"][0], run.status
    alone["seer"] = node("WanCoreSkipping", **{**MAGCACHE, "cache": "taylorseer"})
    alone["plan"]["inputs"] |= {"skipping": ["seer", 0]}
    message = comfy.run(alone).message("execution_error")["exception_message"]
    assert "positive and skipping are for models of the WanCore Model Loader" in message

"""Ten mistakes of users, in a running ComfyUI: each is told on the node where it is, in one sentence that says what is
wrong, and one that says what to do; before the prompt runs where constants show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image

from tests.comfyui import ComfyUI, Graph, Refused
from tests.stand_ins import write_stand_in
from tools.embedded_graphs import image_to_video, node, small
from wan_core.pipeline.sources import TINY

pytestmark = pytest.mark.comfy

HIGH, LOW = "high_noise.safetensors", "low_noise.safetensors"  # the embedded model's, as a model of 14B
BROKEN, PAGE = "broken_high_noise.safetensors", "page_high_noise.safetensors"
VAE_5B, LORA = "wan2.2_vae.safetensors", "wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise.safetensors"
REFUSED, FAILED, WARNED = "before the prompt runs", "when the node runs", "and the prompt runs"


def changed(changed_graph: Graph, **nodes: dict[str, Any]) -> Graph:
    """nodes: by name in the graph, inputs that are others."""
    for name, inputs in nodes.items():
        changed_graph[name] = {**changed_graph[name], "inputs": changed_graph[name]["inputs"] | inputs}
    return changed_graph


def small_14b() -> Graph:
    return changed(small(), model={"high": HIGH, "low": LOW})


def with_picture() -> Graph:
    return changed(image_to_video(), model={"high": HIGH, "low": LOW}, sampler={"steps": 2})


def with_lora() -> Graph:
    own = {"model": ["model", 0], "high": LORA, "strength_high": 1.0, "low": "the file above", "strength_low": 1.0}
    nodes = small_14b() | {"lora": node("WanCoreLoRA", **own)}
    return changed(nodes, sampler={"model": ["lora", 0]})


def with_ksampler() -> Graph:
    nodes = small_14b()
    links = {name: nodes["sampler"]["inputs"][name] for name in ("model", "positive", "negative")}
    own = {"seed": 1, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    nodes["sampler"] = node("KSampler", **links, latent_image=["size", 0], **own)
    nodes["decode"]["inputs"].pop("report")
    return nodes


def unconnected() -> Graph:
    nodes = small_14b()
    for name in ("model", "positive", "negative", "latent"):
        del nodes["sampler"]["inputs"][name]
    return nodes


class Mistake(NamedTuple):
    """where: the node. what: words of the first sentence. help: words of what to do."""

    graph: Graph
    when: str
    where: str
    what: str
    help: str


MISTAKES = {
    "wrong size": Mistake(
        changed(small_14b(), size={"width": 100}), REFUSED, "size", "100x48 given", "The nearest is 96x48"
    ),
    "swapped experts": Mistake(
        changed(small_14b(), model={"high": LOW, "low": HIGH}),
        WARNED,
        "sampler",
        "the experts are swapped: ",
        "Exchange the two files",
    ),
    "few steps": Mistake(
        small_14b(), WARNED, "sampler", "steps, and no file says by its metadata or name", "Add a four-step LoRA"
    ),
    "guidance and shift": Mistake(
        changed(small_14b(), sampler={"guidance_high": 50.0, "shift": 100.0}),
        WARNED,
        "sampler",
        "warning: guidance 50 burns",
        "warning: shift 100 spends",
    ),
    "missing LoRA": Mistake(
        with_lora(), REFUSED, "lora", f"'{LORA}' is not a model in", "models t2v-A14B --with four-steps --download"
    ),
    "T2V model with a picture": Mistake(
        with_picture(), FAILED, "sampler", "takes no image", "load an image-to-video model"
    ),
    "5B VAE with A14B": Mistake(
        changed(small_14b(), vae={"vae": VAE_5B}), FAILED, "decode", "it is that of 5B", "Choose wan_2.1_vae"
    ),
    "transformer file in the VAE loader": Mistake(
        changed(small_14b(), vae={"vae": HIGH}),
        REFUSED,
        "vae",
        "this is a Wan transformer",
        "a Wan VAE is expected here",
    ),
    "broken download": Mistake(
        changed(small_14b(), model={"high": BROKEN}), REFUSED, "model", "truncated or damaged", "Download it again"
    ),
    "a web page in place of a model": Mistake(
        changed(small_14b(), model={"high": PAGE}),
        REFUSED,
        "model",
        "a web page, not a model",
        "Download the file itself",
    ),
    "nothing connected": Mistake(unconnected(), REFUSED, "sampler", "model", ""),
    "huge size": Mistake(
        changed(small_14b(), size={"width": 8192, "height": 8192, "frames": 4001}),
        REFUSED,
        "size",
        "8192x8192 and 4001 frames take",
        "are available",
    ),
    "KSampler on our loader": Mistake(with_ksampler(), REFUSED, "sampler", "WANCORE_MODEL", "MODEL"),
}


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    models = base / "models"
    for expert in ("high", "low"):
        (models / "diffusion_models" / f"{expert}_noise.safetensors").symlink_to(TINY / f"t2v_{expert}.safetensors")
    whole = (TINY / "t2v_high.safetensors").read_bytes()
    (models / "diffusion_models" / BROKEN).write_bytes(whole[: len(whole) // 2])
    (models / "diffusion_models" / PAGE).write_text("<!DOCTYPE html><html><body>401 Unauthorized</body></html>")
    (models / "vae" / HIGH).symlink_to(TINY / "t2v_high.safetensors")
    write_stand_in(models / "vae" / VAE_5B)
    Image.fromarray(np.full((48, 48, 3), 90, np.uint8)).save(base / "input" / "first.png")


def told(comfy: ComfyUI, graph: Graph) -> tuple[str, str, str]:
    """When, where and what."""
    try:
        run = comfy.run(graph)
    except Refused as refused:
        [(where, one)] = refused.errors.items()
        return REFUSED, where, "; ".join(error["details"] for error in one["errors"])
    if not run.ok:
        error = run.message("execution_error")
        return FAILED, error["node_id"], error["exception_message"]
    lines = "\n".join(run.outputs["sampler"]["text"]).splitlines()
    return WARNED, "sampler", "\n".join(line for line in lines if line.startswith("warning: "))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_where_it_is(comfy: ComfyUI, name: str) -> None:
    graph, *expected, what, help_ = MISTAKES[name]
    *place, message = told(comfy, graph)
    assert place == expected, message
    assert what in message and help_ in message, message

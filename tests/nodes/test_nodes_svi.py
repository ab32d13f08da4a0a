"""Clips of SVI 2.0 Pro as a graph in a running ComfyUI: the latents of the command line, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from benchmarks.comfyui import Graph
from tests.comfyui import ComfyUI
from tools.embedded_graphs import CAPTION, TINY_I2V, loaders, node, sampler
from wan_core.config import LoadOptions, Request
from wan_core.pipeline.pipeline import Pipeline

pytestmark = pytest.mark.comfy
WIDTH, HEIGHT, CLIP = 48, 32, 17


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(base / "input" / "anchor.png")


def clip(number: int, **more: list[object]) -> Graph:
    links = {"positive": ["text", 0], "negative": ["text", 1], "vae": ["vae", 0], "anchor": ["picture", 0]}
    size = {"width": WIDTH, "height": HEIGHT, "frames": CLIP}
    name = f"known{number}"
    links_in = {"positive": [name, 0], "negative": [name, 1], "latent": [name, 2]}
    return {
        name: node("WanCoreImageToVideo", **links, **size, **more),
        f"clip{number}": sampler(**links_in, seed=3 + number, steps=2),
    }


def two_clips() -> Graph:
    """The graph of the template *Endless image to video*, for two clips."""
    return {
        **loaders(TINY_I2V, TINY_I2V),
        "picture": node("LoadImage", image="anchor.png"),
        **clip(0),
        **clip(1, previous=["clip0", 0]),
        "new": node("TrimVideoLatent", samples=["clip1", 0], trim_amount=2),
        "joined": node("LatentConcat", samples1=["clip0", 0], samples2=["new", 0], dim="t"),
        "save": node("SaveLatent", samples=["joined", 0], filename_prefix="svi"),
        "plan": node("WanCorePlanPreview", model=["model", 0], positive=["known1", 0]),
        "words": node("PreviewAny", source=["plan", 1]),
    }  # fmt: skip


def test_a_graph_makes_the_latents_of_the_command_line(comfy: ComfyUI) -> None:
    run = comfy.run(two_clips())
    assert run.ok, run.status
    [path] = Path(comfy.base, "output").glob("svi*.latent")
    latents = load_file(path)["latent_tensor"]
    pipe = Pipeline.load(LoadOptions(model="tiny", task="i2v-tiny", device="cpu"))
    picture = str(Path(comfy.base) / "input" / "anchor.png")
    size = {"width": WIDTH, "height": HEIGHT, "clip_frames": CLIP, "frames": 2 * CLIP - 5}
    expected = pipe.generate(Request(prompt=CAPTION, image=picture, svi=True, steps=2, seed=3, **size)).latents  # type: ignore[arg-type]
    assert latents.shape == expected.shape == (1, 16, 8, HEIGHT // 8, WIDTH // 8)
    assert (latents - expected).abs().max() < 1e-4 * expected.abs().max()
    assert torch.isfinite(latents).all()
    assert "the latents before are its frames 1 to 4" in run.outputs["words"]["text"][0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"anchor": None}, "previous connected without anchor"),
        ({"first_image": ["picture", 0]}, "a clip of SVI begins with the anchor alone"),
        ({"width": 64}, "connect the latents of a video of the same size"),
        ({"frames": 5}, "make it longer, or hand fewer on"),
    ],
)
def test_what_cannot_be_is_refused(comfy: ComfyUI, changed: dict[str, object], message: str) -> None:
    graph = two_clips()
    inputs = graph["known1"]["inputs"] | changed
    graph["known1"]["inputs"] = {name: value for name, value in inputs.items() if value is not None}
    run = comfy.run(graph)
    assert not run.ok and message in str(run.status)

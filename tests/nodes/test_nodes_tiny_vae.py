"""A tiny autoencoder in a running ComfyUI: as the VAE that decodes, and as what draws previews."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.comfyui import ComfyUI
from tests.models.test_tiny_vae import weights_of
from tools.embedded_graphs import node, text_to_video
from wan_core.checkpoint import save
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import write_safetensors
from wan_core.media.video import read_video
from wan_core.models.wan.config import DiTConfig

pytestmark = pytest.mark.comfy

SIZE = {"width": 64, "height": 48, "frames": 9}


ARGUMENTS = ["--preview-method", "taesd"]


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    for folder in ("vae", "vae_approx"):
        path = base / "models" / folder / "taew2_1.safetensors"
        path.parent.mkdir(exist_ok=True)
        write_safetensors(weights_of("taew2_1"), path, {})
    make_model(base / "models" / "diffusion_models" / "wan2.1_t2v_14B.safetensors")


def make_model(path: Path) -> None:
    """A small text-to-video transformer of Wan 2.1, for the embedded model's text encoder."""
    config = DiTConfig(
        in_channels=16, out_channels=16, dim=64, ffn_dim=96, num_heads=2, num_layers=2, text_dim=64, text_len=32
    )
    save(random_module(config, device=torch.device("cpu"), dtype=torch.float32, seed=0), path)


def test_it_decodes_and_draws_previews(comfy: ComfyUI) -> None:
    graph = text_to_video(SIZE, steps=2)
    model = {"high": "wan2.1_t2v_14B.safetensors", "low": "none", "precision": "checkpoint", "attention": "auto"}
    graph["model"] = node("WanCoreModelLoader", **model, residency="auto")
    graph["vae"] = node("WanCoreVAELoader", vae="taew2_1.safetensors", precision="auto")
    run = comfy.watch(graph)
    assert run.ok, run.status
    assert read_video(comfy.output_file(run, "save")).shape == (9, 48, 64, 3)
    previews = [Image.open(io.BytesIO(event["data"])) for event in run.events if event["type"] == "preview"]
    assert len(previews) == 2 and {one.size for one in previews} == {(512, 384)}  # as ComfyUI sends them
    assert "WanCore draws previews with taew2_1.safetensors" in comfy.log()

"""WanCore VACE in a running ComfyUI, with a file of random weights: a clip is what the command line makes of the same
pictures, and what ComfyUI's own sampling makes of the same conditioning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.animate_references import draw_weights
from tests.comfy_control_clip import VACE
from tests.comfyui import ComfyUI, Graph, saved_latents
from tests.nodes.comfy_files import write_parts
from tests.nodes.test_nodes_driven import smooth
from tests.nodes.workflow_pages import api_form
from tests.pipeline.test_clips import HEIGHT, WIDTH, drawn
from tools.embedded_graphs import node
from wan_core.config import ControlOptions, LoadOptions, Request
from wan_core.pipeline.pipeline import Pipeline

pytestmark = [pytest.mark.comfy, pytest.mark.slow]
PLAN = {"steps": 4, "seed": 3, "guidance_high": 1.5, "guidance_low": 1.5, "shift": 3.0, "solver": "euler"}
PROMPTS = {"positive": "a red circle", "negative": "blue"}
SIZE = {"width": WIDTH, "height": HEIGHT, "frames": 5}
VIDEO_MODEL = "wan2.1_vace.safetensors"


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    config = type(VACE)(**{**VACE.__dict__, "text_dim": 64})
    save_file(draw_weights(config), base / "models" / "diffusion_models" / VIDEO_MODEL)
    write_parts(base)
    Image.fromarray(smooth(HEIGHT, WIDTH)).save(base / "input" / "first.png")
    Image.fromarray(drawn(1, 30, 20, 5)[0]).save(base / "input" / "reference.png")


def graph_of(**more: Any) -> Graph:
    """The shared workflow of first and last frames, smaller, with a reference and the latents kept."""
    graph = api_form("wan21_vace_first_last_frame")
    named = {one["class_type"]: key for key, one in reversed(graph.items())}
    graph[named["WanCoreModelLoader"]]["inputs"]["high"] = VIDEO_MODEL
    graph[named["WanCoreTextEncoderLoader"]]["inputs"]["text_encoder"] = "umt5.safetensors"
    graph[named["WanCoreVAELoader"]]["inputs"]["vae"] = "vae.safetensors"
    graph[named["WanCoreTextEncode"]]["inputs"] |= PROMPTS
    graph["reference"] = node("LoadImage", image="reference.png")
    graph["first"] = node("LoadImage", image="first.png")
    vace = graph[named["WanCoreVACE"]]["inputs"]
    del vace["last_image"]
    vace |= {**SIZE, "first_image": ["first", 0], "reference_images": ["reference", 0], **more}
    graph[named["WanCoreSampler"]]["inputs"] |= PLAN
    graph["kept"] = node("SaveLatent", samples=[named["WanCoreSampler"], 0], filename_prefix="kept")
    wanted, waiting = set(), ["kept"]
    while waiting:
        name = waiting.pop()
        wanted.add(name)
        waiting += [value[0] for value in graph[name]["inputs"].values() if isinstance(value, list)]
    return {name: one for name, one in graph.items() if name in wanted}


@pytest.mark.parametrize("part", [{}, {"strength": 0.6, "end": 0.5}])
def test_a_clip_of_vace_is_the_command_lines(comfy: ComfyUI, part: dict[str, float]) -> None:
    latents = saved_latents(comfy, graph_of(**part))
    assert latents.shape == (1, 16, 3, HEIGHT // 8, WIDTH // 8)
    models, control = comfy.base / "models", ControlOptions(scale=part.get("strength", 1.0), end=part.get("end", 1.0))
    files = {"high": f"diffusion_models/{VIDEO_MODEL}", "text_encoder": "text_encoders/umt5.safetensors"}
    options = {name: str(models / path) for name, path in {**files, "vae": "vae/vae.safetensors"}.items()}
    pictures = {"image": str(comfy.base / "input/first.png"), "reference": str(comfy.base / "input/reference.png")}
    prompts = {"prompt": PROMPTS["positive"], "negative_prompt": PROMPTS["negative"]}
    request = Request(**pictures, **prompts, **SIZE, **PLAN, control=control)
    expected = Pipeline.load(LoadOptions(device="cpu", **options)).generate(request).latents
    assert float((expected - latents).norm() / latents.norm()) < 1e-3
    if part:
        assert not torch.allclose(latents, saved_latents(comfy, graph_of()), atol=1e-3)

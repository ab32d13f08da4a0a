"""Wan 2.1 image-to-video in a running ComfyUI, whose own nodes compute the CLIP features: the shared workflow, with
files of random weights under the names that it gives."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.comfyui import ComfyUI, Graph, saved_latents
from tests.nodes.comfy_files import write_parts
from tests.nodes.workflow_pages import api_form
from tests.pipeline.test_wan21 import IMAGE_TO_VIDEO, written
from tools.embedded_graphs import node
from wan_core.config import LoadOptions, Request
from wan_core.pipeline.pipeline import Pipeline

pytestmark = [pytest.mark.comfy, pytest.mark.slow]
SIZE = {"width": 48, "height": 32, "frames": 5}
PLAN = {"steps": 2, "seed": 3}
WIDTH, WIDE, LAYERS, TOKENS, PATCH = 1280, 5120, 32, 257, 14  # of the vision encoder: ComfyUI knows no other size
LARGE = 2**20  # numbers; larger weights are zero, and a sparse file holds them


def vision_shapes() -> dict[str, list[int]]:
    """The names and shapes of `clip_vision_h.safetensors`."""
    shapes = {
        "embeddings.class_embedding": [WIDTH],
        "embeddings.patch_embedding.weight": [WIDTH, 3, PATCH, PATCH],
        "embeddings.position_embedding.weight": [TOKENS, WIDTH],
        "post_layernorm.weight": [WIDTH],
        "post_layernorm.bias": [WIDTH],
        "pre_layrnorm.weight": [WIDTH],
        "pre_layrnorm.bias": [WIDTH],
    }
    for layer in (f"encoder.layers.{n}" for n in range(LAYERS)):
        for name in ("layer_norm1", "layer_norm2"):
            shapes |= {f"{layer}.{name}.weight": [WIDTH], f"{layer}.{name}.bias": [WIDTH]}
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= {f"{layer}.self_attn.{name}.weight": [WIDTH, WIDTH], f"{layer}.self_attn.{name}.bias": [WIDTH]}
        shapes |= {f"{layer}.mlp.fc1.weight": [WIDE, WIDTH], f"{layer}.mlp.fc1.bias": [WIDE]}
        shapes |= {f"{layer}.mlp.fc2.weight": [WIDTH, WIDE], f"{layer}.mlp.fc2.bias": [WIDTH]}
    named = {f"vision_model.{name}": shape for name, shape in shapes.items()}
    return {**named, "visual_projection.weight": [1024, WIDTH]}


def write_vision(path: Path) -> None:
    """The whole encoder in fp16, 1.3 GB of which few are on the disk."""
    shapes, header, end = vision_shapes(), {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end + 2 * math.prod(shape)]}
        end += 2 * math.prod(shape)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    draw = np.random.default_rng(4)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in shapes.items():
            if math.prod(shape) < LARGE:
                values = draw.normal(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.02, shape)
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                file.write(values.astype(np.float16).tobytes())
        file.truncate(8 + len(text) + end)


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    written(IMAGE_TO_VIDEO, base / "models" / "diffusion_models" / "wan2.1_i2v_480p_14B_fp16.safetensors")
    write_parts(base, "umt5_xxl_fp16", "wan_2.1_vae")
    write_vision(base / "models" / "clip_vision" / "clip_vision_h.safetensors")
    for seed, name in enumerate(("example.png", "other.png")):
        few = np.random.default_rng(seed).integers(0, 255, (2, 3, 3), dtype=np.uint8)
        Image.fromarray(few).resize((300, 200), Image.Resampling.BICUBIC).save(base / "input" / name)


def of_kind(graph: Graph, kind: str) -> dict[str, object]:
    [inputs] = [one["inputs"] for one in graph.values() if one["class_type"] == kind]
    return inputs


def smaller(**changes: object) -> Graph:
    graph = api_form("image_to_video_wan21")
    of_kind(graph, "WanCoreImageToVideo").update(SIZE)
    of_kind(graph, "WanCoreSampler").update(PLAN)
    [sampler] = [key for key, one in graph.items() if one["class_type"] == "WanCoreSampler"]
    return graph | {"kept": node("SaveLatent", samples=[sampler, 0], filename_prefix="kept")} | changes


def test_the_workflow_makes_what_the_command_line_makes(comfy: ComfyUI) -> None:
    graph = smaller()
    theirs = saved_latents(comfy, graph)
    models = {folder.name: next(folder.iterdir(), None) for folder in (comfy.base / "models").iterdir()}
    options = LoadOptions(
        high=str(models["diffusion_models"]),
        text_encoder=str(models["text_encoders"]),
        vae=str(models["vae"]),
        clip_vision=str(models["clip_vision"]),
        device="cpu",
    )
    text = of_kind(graph, "WanCoreTextEncode")
    image = str(comfy.base / "input" / "example.png")
    prompts = {"prompt": str(text["positive"]), "negative_prompt": str(text["negative"])}
    result = Pipeline.load(options).generate(Request(**prompts, image=image, **SIZE, **PLAN))
    assert result.latents.shape == theirs.shape
    error = (result.latents - theirs).norm() / theirs.norm()
    assert error < 1e-3, f"{error}"  # ComfyUI resizes with antialiasing and rounds; the reference and the engine do not


def test_the_features_of_another_picture_count(comfy: ComfyUI) -> None:
    graph = smaller(other=node("LoadImage", image="other.png"))
    one = saved_latents(comfy, graph)
    of_kind(graph, "CLIPVisionEncode")["image"] = ["other", 0]
    assert not torch.equal(saved_latents(comfy, graph), one)

"""Wan 2.1 end to end: random tiny transformers, written as files and run through the pipeline on the CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.encoder_files import write_vision
from wan_core.checkpoint import detect, load_dit, save
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import write_safetensors
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.models.wan.config import I2V_14B, T2V_1_3B, T2V_A14B, DiTConfig
from wan_core.models.wan.families import choose_task, find_task
from wan_core.models.wan.families.plain import diffusers_modules
from wan_core.models.wan.families.task import Clues
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.encode import clip_features
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.sources import TINY, find_models

CPU = torch.device("cpu")
TEXT_TO_VIDEO = DiTConfig(
    in_channels=16, out_channels=16, dim=128, ffn_dim=128, num_heads=2, num_layers=2, text_dim=64, text_len=32
)
IMAGE_TO_VIDEO = replace(TEXT_TO_VIDEO, in_channels=36, image_dim=1280)
SMALL = {"width": 48, "height": 32, "frames": 5, "steps": 2, "seed": 3}


def written(config: DiTConfig, path: Path) -> Path:
    module = random_module(config, device="cpu", dtype=torch.float32, seed=1)
    save(module, path)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both transformers, a vision encoder in Hugging Face's layout and an image."""
    folder = tmp_path_factory.mktemp("models")
    written(TEXT_TO_VIDEO, folder / "wan2.1_t2v_14B.safetensors")
    written(IMAGE_TO_VIDEO, folder / "wan2.1_i2v_480p_14B.safetensors")
    write_vision(folder / "clip_vision_h.safetensors")
    pixels = np.random.default_rng(0).integers(0, 255, (32, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    return folder


def options(high: Path, **more: str) -> LoadOptions:
    text_encoder, vae = (str(TINY / f"{name}.safetensors") for name in ("text_encoder", "vae"))
    return LoadOptions(high=str(high), text_encoder=text_encoder, vae=vae, device="cpu", **more)


def test_text_to_video(files: Path) -> None:
    pipe = Pipeline.load(options(files / "wan2.1_t2v_14B.safetensors"))
    assert pipe.models.task.name == "t2v-14B"
    assert (
        "task: t2v-14B (Wan 2.1 by its name wan2.1_t2v_14B.safetensors; if it is not, its task is t2v-A14B)"
        in pipe.loaded.notes
    )
    result = pipe.generate(Request(prompt="a red circle", **SMALL))
    assert result.frames.shape == (5, 32, 48, 3) and result.latents.isfinite().all()
    assert {step.expert for step in result.plan.steps} == {"high"}
    assert (result.plan.shift, result.plan.guidance_of("high")) == (5.0, 5.0)


@pytest.mark.parametrize("residency", ["auto", "stream"])
def test_image_to_video(files: Path, residency: str) -> None:
    clip, image = str(files / "clip_vision_h.safetensors"), str(files / "image.png")
    high = files / "wan2.1_i2v_480p_14B.safetensors"
    pipe = Pipeline.load(options(high, clip_vision=clip, residency=residency))
    assert pipe.models.task.name == "i2v-14B-480P" and pipe.models.residency.policy != "swap"
    request = Request(prompt="a red circle", image=image, **SMALL)
    conditioning = pipe.encode(pipe.prepare(request))
    assert conditioning.image_features is not None and conditioning.image_features.shape == (1, 5, 1280)
    result = pipe.generate(request)
    assert result.frames.shape == (5, 32, 48, 3) and result.latents.isfinite().all()
    run = pipe.prepare(request)
    other = replace(conditioning, image_features=conditioning.image_features.flip(1) * 2)
    assert not torch.equal(pipe.sample(run, other).cpu(), result.latents)  # CLIP features count
    batched = pipe.generate(replace(request, guidance_mode="batched"))
    torch.testing.assert_close(batched.latents, result.latents, rtol=1e-3, atol=1e-3)


def test_clip_sees_the_whole_image(files: Path) -> None:
    clip, image = str(files / "clip_vision_h.safetensors"), files / "large.png"
    pixels = np.random.default_rng(1).integers(0, 255, (80, 64, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(image)
    pipe = Pipeline.load(options(files / "wan2.1_i2v_480p_14B.safetensors", clip_vision=clip))
    run = pipe.prepare(Request(prompt="a red circle", image=str(image), **SMALL))
    features = clip_features(run, run.job.clips[0], {})["image"]
    whole = torch.from_numpy(pixels).movedim(-1, 0)[None] / 127.5 - 1
    assert features is not None
    with torch.no_grad():
        torch.testing.assert_close(features, pipe.models.clip_vision()(whole))


def test_the_vision_encoder_is_asked_for_and_refused(files: Path) -> None:
    with pytest.raises(OptionError, match=r"--clip-vision FILE, clip_vision_h\.safetensors"):
        find_models(options(files / "wan2.1_i2v_480p_14B.safetensors"))
    clip = str(files / "clip_vision_h.safetensors")
    with pytest.raises(OptionError, match="leave --clip-vision out"):
        find_models(options(files / "wan2.1_t2v_14B.safetensors", clip_vision=clip))
    with pytest.raises(OptionError, match="needs no CLIP features"):
        find_models(options(files / "wan2.1_i2v_480p_14B.safetensors", task="i2v-A14B"))


@pytest.mark.parametrize(
    ("config", "path", "alone", "task"),
    [
        (T2V_A14B, "wan2.1_t2v_14B_bf16.safetensors", True, "t2v-14B"),
        (T2V_A14B, "Wan2_1-T2V-14B_fp8_e4m3fn.safetensors", True, "t2v-14B"),
        (T2V_A14B, "Wan2.1-T2V-14B/diffusion_pytorch_model.safetensors.index.json", True, "t2v-14B"),
        (T2V_A14B, "Wan2.1-T2V-14B-Diffusers/transformer", True, "t2v-14B"),
        (T2V_A14B, "wan2.2_t2v_high_noise_14B.safetensors", True, "t2v-A14B"),
        (T2V_A14B, "Wan2.1/wan2.2_t2v_high_noise_14B.safetensors", True, "t2v-A14B"),
        (T2V_A14B, "wan2.1_t2v_14B_bf16.safetensors", False, "t2v-A14B"),
        (T2V_A14B, "model.safetensors", True, "t2v-A14B"),
        (T2V_1_3B, "model.safetensors", True, "t2v-1.3B"),
        (I2V_14B, "wan2.1_i2v_720p_14B.safetensors", True, "i2v-14B-720P"),
        (I2V_14B, "Wan2_1-I2V-14B-480P.safetensors", True, "i2v-14B-480P"),
        (I2V_14B, "model.safetensors", True, "i2v-14B-480P"),
    ],
)
def test_which_task_a_file_is_for(config: DiTConfig, path: str, alone: bool, task: str) -> None:
    choice = choose_task(config, Clues(Path("/models") / path, {}, alone))
    assert choice.task is find_task(task)
    told_by_tensors = config == T2V_1_3B or not alone or "2.2" in path
    assert bool(choice.why) == (not told_by_tensors)
    named = choose_task(T2V_A14B, Clues(Path("x.safetensors"), {"modelspec.title": "Wan 2.1 T2V 14B"}))
    assert named.task.name == "t2v-14B"


def test_diffusers_and_comfyui_layouts_give_the_same_model(files: Path) -> None:
    ours = load_dit(files / "wan2.1_i2v_480p_14B.safetensors").state_dict()
    modules = {official: theirs for theirs, official in diffusers_modules(IMAGE_TO_VIDEO.num_layers).items()}

    def diffusers(name: str) -> str:
        module, _, kind = name.rpartition(".")
        return modules[name] if name in modules else f"{modules[module]}.{kind}"

    metadata = {"num_heads": "2", "text_len": "32"}
    comfyui = {f"model.diffusion_model.{name}": value for name, value in ours.items()}
    for state in (comfyui, {diffusers(name): value for name, value in ours.items()}):
        path = files / "other.safetensors"
        write_safetensors(state, path, metadata)
        assert detect(path).config == IMAGE_TO_VIDEO
        loaded = load_dit(path).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in ours.items())


def test_image_keys_and_values_are_quantised(files: Path) -> None:
    names = IMAGE_TO_VIDEO.quantized_names()
    assert {"blocks.1.cross_attn.k_img", "blocks.0.cross_attn.v_img"} <= names
    assert len(names) == len(TEXT_TO_VIDEO.quantized_names()) + 4
    plain = load_dit(files / "wan2.1_i2v_480p_14B.safetensors")
    quantised = load_dit(
        files / "wan2.1_i2v_480p_14B.safetensors", quantization=Quantization(SCHEMES["fp8-weights"].linear, CPU)
    )
    text, image = torch.randn(1, 4, 64), torch.randn(1, 5, 1280)
    keys_values = (model.prepare_text(text, image).keys_values[0] for model in (plain, quantised))
    for a, b in zip(*keys_values, strict=True):
        assert not torch.equal(a, b)
        assert (a - b).norm() / a.norm() < 0.1

"""Tiny random weights under the names, in the folders and in the layouts of the files that docs/models.md lists.

What a file holds follows from its name, as people read it: the model, and how its matrices are stored. Text encoders
have the embedded model's tokenizer, because UMT5's is not at hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.documented import folder_of
from tests.encoder_files import VISION, huggingface_names, write_speech
from tests.gguf_files import llama_name, matrices, tokenizer_notes
from tests.gguf_files import write as write_gguf
from tests.int8_files import described, encoded
from tests.models.test_vision import official as openclip_names
from tests.reference_models import diffusers_transformer, diffusers_vae, transformers_encoder
from wan_core.checkpoint.detect import TOKENIZER, detect
from wan_core.checkpoint.random import random_module
from wan_core.models.text.umt5 import TextConfig
from wan_core.models.vae.config import WAN22_MEAN, WAN22_STD, VAEConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.animate import AnimateConfig
from wan_core.models.wan.families.animate2 import Animate2Config
from wan_core.models.wan.families.fun import FunCameraConfig, FunControlConfig
from wan_core.models.wan.families.s2v import S2VConfig
from wan_core.models.wan.families.vace import VaceConfig
from wan_core.ops.kernels.formats import FP8, quantize_reference
from wan_core.pipeline.sources import TINY

# Heads of 128, which files without metadata have; rows of 256, which packed formats divide into blocks.
SMALL: dict[str, Any] = {
    "out_channels": 16, "dim": 256, "ffn_dim": 256, "num_heads": 2, "num_layers": 2, "text_dim": 64, "freq_dim": 32
}  # fmt: skip
SEEING = replace(VISION, num_layers=2)  # of the three that `openclip_names` reads
IMAGE_TO_VIDEO = DiTConfig(**SMALL, in_channels=36)
TEXT_TO_VIDEO = DiTConfig(**SMALL, in_channels=16)
TRANSFORMERS: dict[str, DiTConfig] = {  # what is in the name -> the model; the first that is there
    "animate_2": Animate2Config(**SMALL, in_channels=36, image_dim=1280),
    "animate": AnimateConfig(
        **SMALL,
        in_channels=36,
        image_dim=1280,
        motion_channels=(4, 6, 8),
        motion_features=12,
        motion_directions=5,
        face_hidden=16,
    ),
    "vace": VaceConfig(**SMALL, in_channels=16, vace_every=1),
    "fun_control": FunControlConfig(**SMALL, in_channels=52),
    "camera": FunCameraConfig(**SMALL, in_channels=36),
    "fun_inpaint": IMAGE_TO_VIDEO,
    "s2v": S2VConfig(**SMALL, in_channels=16, audio_layers=3, audio_dim=128, injectors=1),
    "ti2v": DiTConfig(**{**SMALL, "out_channels": 48}, in_channels=48),
    "i2v": IMAGE_TO_VIDEO,
    "t2v": TEXT_TO_VIDEO,
}
VAE_22 = VAEConfig(
    z_dim=48, encoder_dim=8, decoder_dim=8, patch=2, residual=True, latents_mean=WAN22_MEAN, latents_std=WAN22_STD
)
State = dict[str, Tensor]


def text_config() -> TextConfig:
    config = detect(TINY / "text_encoder.safetensors", "text_encoder").config
    assert isinstance(config, TextConfig)
    return config


def config_of(name: str) -> DiTConfig:
    """The config of the model that a file, a release or a task is named after."""
    return next(config for pattern, config in TRANSFORMERS.items() if pattern in name.lower().replace("-", "_"))


def drawn(config: Any, name: str, dtype: torch.dtype = torch.bfloat16) -> State:
    """Experts differ: their seed is their name."""
    return random_module(config, device="cpu", dtype=dtype, seed=sum(name.encode())).state_dict()


# --------------------------------------------------------------------------------------------------------- single files


def write_stand_in(path: Path) -> None:
    """The file of this name, in a folder that is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[folder_of(path.name)](path)


def write_transformer(path: Path) -> None:
    config, quantised = config_of(path.name), re.search(r"fp8_scaled|int8_convrot|Q\d_(K|\d)", path.name)
    state = drawn(config, path.name, torch.float16 if "fp16" in path.name else torch.bfloat16)
    if path.suffix == ".gguf":
        assert quantised is not None
        write_gguf(path, state, matrices(quantised[0]))
        return
    names = {f"{name}.weight" for name in config.quantized_names()}
    if quantised is not None and quantised[0] == "fp8_scaled":
        state = in_fp8(state, names)
    elif quantised is not None:
        state = in_int8(state, names)
    told = {"config": json.dumps({"transformer": {"model_type": "animate2"}})}
    save_file(state, path, told if isinstance(config, Animate2Config) else None)


def in_fp8(state: Mapping[str, Tensor], names: set[str]) -> State:
    """The matrices `names` in FP8, each with one scale, as Comfy-Org's files of Wan 2.2 have them."""
    fp8_state: State = {"scaled_fp8": torch.zeros(2).to(FP8)}
    for name, value in state.items():
        fp8_state[name] = value
        if name in names:
            fp8_state[name], scale = quantize_reference(value, "tensor")
            fp8_state[name.removesuffix("weight") + "scale_weight"] = scale.reshape(1)
    return fp8_state


def in_int8(state: Mapping[str, Tensor], names: set[str]) -> State:
    int8_state: State = {}
    for name, value in state.items():
        if name not in names:
            int8_state[name] = value
            continue
        linear, kind = name.removesuffix(".weight"), "rotated 256"
        int8_state |= {f"{linear}.{part}": tensor for part, tensor in encoded(kind, value).items()}
        int8_state[f"{linear}.comfy_quant"] = torch.tensor(
            list(json.dumps(described(kind)).encode()), dtype=torch.uint8
        )
    return int8_state


def write_text_encoder(path: Path) -> None:
    ours = load_file(TINY / "text_encoder.safetensors")
    proto = ours.pop(TOKENIZER)
    if path.suffix == ".gguf":
        note = tokenizer_notes(proto.numpy().tobytes())
        fits = matrices("Q8_0")
        write_gguf(
            path, ours, lambda name, value: "F32" if value.shape[-1] % 32 else fits(name, value),
            arch="t5encoder", notes=note, rename=llama_name,
        )  # fmt: skip
        return
    torch.manual_seed(1)
    state = dict(transformers_encoder(text_config()).state_dict())
    state.pop("encoder.embed_tokens.weight")  # the same as shared.weight, which files have once
    names = {name for name in state if re.search(r"\.(q|k|v|o|wi_0|wi_1|wo)\.weight$", name)}
    save_file(in_fp8(state, names) | {TOKENIZER: proto}, path)


def write_vae(path: Path) -> None:
    save_file(vae_state(path.name), path)


def vae_state(name: str) -> State:
    if "2.2" in name:
        return drawn(VAE_22, name, torch.float32)
    return load_file(TINY / "vae.safetensors")  # without its metadata, as Wan's own


def write_vision(path: Path) -> None:
    save_file(huggingface_names(drawn(SEEING, "vision")), path)


def write_lora(path: Path) -> None:
    """For the queries of every block."""
    draw, state = torch.Generator().manual_seed(sum(path.name.encode())), {}
    for block in range(SMALL["num_layers"]):
        name = f"diffusion_model.blocks.{block}.self_attn.q"
        for part, shape in (("lora_down", (4, SMALL["dim"])), ("lora_up", (SMALL["dim"], 4))):
            state[f"{name}.{part}.weight"] = torch.randn(shape, generator=draw) * 0.02
        state[f"{name}.alpha"] = torch.tensor(4.0)
    save_file(state, path)


WRITERS: dict[str, Callable[[Path], None]] = {  # by ComfyUI's folder
    "loras": write_lora, "text_encoders": write_text_encoder, "vae": write_vae, "clip_vision": write_vision,
    "audio_encoders": write_speech, "diffusion_models": write_transformer,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- releases


def write_release(folder: Path) -> None:
    """The repository of Wan-AI that is named so, as `hf download` leaves it."""
    config = config_of(folder.name)
    experts = 2 if "A14B" in folder.name else 1
    folder.mkdir(parents=True)
    if folder.name.endswith("-Diffusers"):
        write_diffusers(folder, config, experts)
        return
    for name in ("high_noise_model", "low_noise_model") if experts == 2 else (".",):
        write_shards(folder / name, drawn(config, name, torch.float32))
    tensors = load_file(TINY / "text_encoder.safetensors")
    write_tokenizer(folder / "google/umt5-xxl/spiece.model", tensors.pop(TOKENIZER))
    torch.save(tensors, folder / "models_t5_umt5-xxl-enc-bf16.pth")
    version = "2.2" if config.out_channels == 48 else "2.1"
    torch.save(vae_state(version), folder / f"Wan{version}_VAE.pth")
    if config.image_dim is not None:
        vision = openclip_names(huggingface_names(drawn(SEEING, "vision", torch.float32)))
        torch.save(vision, folder / "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth")
    if isinstance(config, S2VConfig):
        (folder / "wav2vec2-large-xlsr-53-english").mkdir()
        write_speech(folder / "wav2vec2-large-xlsr-53-english/model.safetensors")


def write_shards(folder: Path, state: State) -> None:
    folder.mkdir(exist_ok=True)
    names, shards = sorted(state), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"diffusion_pytorch_model-{number:05}-of-00002.safetensors"
        save_file({name: state[name] for name in part}, folder / file)
        shards |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": shards}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(path: Path, proto: Tensor) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(proto.numpy().tobytes())


def write_diffusers(folder: Path, config: DiTConfig, experts: int) -> None:
    """Written by diffusers and transformers themselves."""
    torch.manual_seed(1)
    for name in ("transformer", "transformer_2")[:experts]:
        diffusers_transformer(config).save_pretrained(folder / name, max_shard_size="2MB")
    transformers_encoder(text_config()).save_pretrained(folder / "text_encoder")
    tiny = detect(TINY / "vae.safetensors", "vae").config
    assert isinstance(tiny, VAEConfig)
    diffusers_vae(VAE_22 if config.out_channels == 48 else tiny).save_pretrained(folder / "vae")
    write_tokenizer(folder / "tokenizer/spiece.model", load_file(TINY / "text_encoder.safetensors")[TOKENIZER])

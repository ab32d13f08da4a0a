"""Tiny encoders of pictures and of sound as files, in Hugging Face's layout, and a VAE faster than the embedded one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from wan_core.checkpoint import save
from wan_core.checkpoint.random import random_module
from wan_core.models.audio.wav2vec2 import SpeechConfig, SpeechEncoder
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.vision.clip import VisionConfig

VISION = VisionConfig(dim=1280, ffn_dim=64, num_layers=1, patch=14, tokens=5)
VAE = VAEConfig(
    z_dim=16, encoder_dim=4, decoder_dim=4, dim_mult=(1, 1, 1, 1), num_res_blocks=1,
    latents_mean=(0.0,) * 16, latents_std=(1.0,) * 16,
)  # fmt: skip
SPEECH = SpeechConfig(dim=128, ffn_dim=32, num_layers=2, conv_dim=16, position_kernel=8)


def huggingface_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a vision encoder under their names, with one more layer at the end, which is not used."""
    top = {"cls": "embeddings.class_embedding", "positions": "embeddings.position_embedding.weight"}
    top |= {"patch.weight": "embeddings.patch_embedding.weight"}
    top |= {f"norm.{kind}": f"pre_layrnorm.{kind}" for kind in ("weight", "bias")}
    modules = {"norm1": "layer_norm1", "norm2": "layer_norm2", "fc1": "mlp.fc1", "fc2": "mlp.fc2"}
    modules |= {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.out_proj"}
    renamed = {theirs: state[ours] for ours, theirs in top.items()}
    for name, value in state.items():
        if name.startswith("layers."):
            _, n, module, kind = name.split(".")
            renamed[f"encoder.layers.{n}.{modules[module]}.{kind}"] = value
            renamed[f"encoder.layers.{int(n) + 1}.{modules[module]}.{kind}"] = value.clone()
    return {f"vision_model.{name}": value for name, value in renamed.items()}


def write_vision(path: Path) -> None:
    vision = random_module(VISION, device="cpu", dtype=torch.float32, seed=2)
    save_file(huggingface_names(vision.state_dict()), path)


def write_vae(path: Path) -> None:
    """A VAE of Wan 2.1's strides with random weights: for videos whose pixels nobody judges."""
    torch.manual_seed(3)
    save(VideoVAE(VAE), path)


def write_speech(path: Path) -> None:
    """With the weight of its convolution in two parts."""
    torch.manual_seed(1)
    state = SpeechEncoder(SPEECH).state_dict()
    direction = state.pop("encoder.pos_conv_embed.conv.weight")
    state["encoder.pos_conv_embed.conv.weight_v"] = direction
    state["encoder.pos_conv_embed.conv.weight_g"] = direction.norm(dim=(0, 1), keepdim=True)
    save_file({f"wav2vec2.{name}": value.half() for name, value in state.items()}, path)

"""Module -> safetensors file in the official layout, with what shapes cannot say in its metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import torch
from torch import Tensor

from wan_core.checkpoint.comfyui_tensors import DESCRIPTION, SUFFIX
from wan_core.checkpoint.detect import TOKENIZER
from wan_core.checkpoint.safetensors_file import safetensors_pieces
from wan_core.config import OptionError
from wan_core.config.outputs import written_beside
from wan_core.models.text.umt5 import TextEncoder
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families import family_of
from wan_core.models.wan.model import WanModel
from wan_core.ops.quant.linear import QuantLinear
from wan_core.ops.quant.packed import PackedEmbedding, PackedLinear


def save(
    module: WanModel | VideoVAE | TextEncoder,
    path: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `module` to `path`, its parameters as `dtype` (None: as they are). metadata: more of the file's.

    Loading it again gives the same module: num_heads, text_len and eps of a transformer and the latent statistics of
    a VAE are in the metadata, the tokenizer of a text encoder is a tensor of bytes, `spiece_model`, as in ComfyUI's
    files. Matrices in FP8 with one scale and in INT8 are described as ComfyUI does, which loads the file too, and which
    attention a transformer's file asked ComfyUI for is written again. The file appears under its name only when it is
    complete.
    """
    source = module.encoder if isinstance(module, TextEncoder) else module
    if any(isinstance(part, PackedLinear | PackedEmbedding) for part in source.modules()):
        raise OptionError(
            "its weights are packed as in the file that it came from (GGUF, NVFP4, MXFP8, INT8 or 4 bits), and are not "
            "written so: load it with a precision of its own, bf16, fp8 or int8, to save it"
        )
    tensors = {name: value.detach().to(dtype or value.dtype) for name, value in source.state_dict().items()}
    for name, part in source.named_modules():
        if isinstance(part, QuantLinear) and part.description is not None:
            tensors |= _described(name, tensors[f"{name}.weight_scale"], part.description)
    if isinstance(module, WanModel):
        tensors |= {name + SUFFIX: _bytes(text) for name, text in module.attention_preferences.items()}
    if isinstance(module, TextEncoder):
        tensors[TOKENIZER] = _bytes(module.tokenizer.proto)
    write_safetensors(tensors, path, {**(metadata or {}), **metadata_of(module)})


def _described(name: str, scale: Tensor, description: Mapping[str, object]) -> dict[str, Tensor]:
    """What ComfyUI needs of a quantised matrix beside its numbers: a scalar where one scale serves all, and the format
    as JSON in bytes."""
    scale = scale.reshape(()) if scale.numel() == 1 else scale
    return {f"{name}.weight_scale": scale, f"{name}.{DESCRIPTION}": _bytes(json.dumps(description).encode())}


def _bytes(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def metadata_of(module: WanModel | VideoVAE | TextEncoder) -> dict[str, str]:
    config = module.encoder.config if isinstance(module, TextEncoder) else module.config
    if isinstance(module, WanModel):
        keys = {"num_heads": "num_heads", "text_len": "text_len", "eps": "eps"}
    elif isinstance(module, VideoVAE):
        keys = {"latents_mean": "latents_mean", "latents_std": "latents_std"}
    else:
        keys = {"relative_attention_max_distance": "max_distance"}
    architecture = {key: json.dumps(getattr(config, field)) for key, field in keys.items()}
    if isinstance(module, TextEncoder):
        architecture["max_length"] = json.dumps(module.tokenizer.max_length)
    own = family_of(module.config).metadata if isinstance(module, WanModel) else {}
    return {"format": "pt", **architecture, **own}


def write_safetensors(tensors: Mapping[str, Tensor], path: str | os.PathLike[str], metadata: Mapping[str, str]) -> None:
    """A safetensors file, written under a temporary name beside `path` and renamed. Raises `OSError` if that fails."""
    with written_beside(path) as temporary, temporary.open("wb") as file:
        file.writelines(safetensors_pieces(tensors, metadata))

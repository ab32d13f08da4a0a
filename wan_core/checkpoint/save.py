"""Module -> safetensors file in the official layout, with what shapes cannot say in its metadata.

Finished latents are written before decoding, so that a failed decode loses nothing: one safetensors file with `latents`
float32 [B, C, T, Y, X], un-normalised as on ComfyUI's LATENT socket, and metadata `fps`, `settings` (JSON, the
settings of the run) and a checksum.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wan_core.checkpoint import CheckpointError, open_checkpoint
from wan_core.checkpoint.comfyui_tensors import DESCRIPTION
from wan_core.checkpoint.detect import TOKENIZER
from wan_core.checkpoint.opened import naming, short_path
from wan_core.checkpoint.safetensors_file import safetensors_pieces
from wan_core.config import OptionError
from wan_core.config.checks import check_file_size
from wan_core.config.durable import SEAL, UNSEALED, check_seal
from wan_core.config.limits import MAX_HEADER, MAX_JSON, MAX_LATENTS
from wan_core.config.outputs import written_beside, written_sealed
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
    files. Matrices in FP8 with one scale and in INT8 are described as ComfyUI does, which loads the file too. The file
    appears under its name only when it is complete.
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


def save_latents(path: str | Path, latents: Tensor, fps: int, settings: Mapping[str, Any]) -> None:
    """Write latents [B, C, T, Y, X]. The file gets its name only when it is complete, and on the disk."""
    metadata = {SEAL: UNSEALED, "fps": str(fps), "settings": json.dumps(settings)}
    with written_sealed(Path(path)) as temporary, temporary.open("wb") as file:
        file.writelines(safetensors_pieces({"latents": latents.float()}, metadata))


def try_to_save_latents(path: str | Path, latents: Tensor, fps: int, settings: Mapping[str, Any]) -> str | None:
    """Like `save_latents`, but a full or read-only disk is no error: the latents are still in memory, and the
    video can be made. Returns None, or a sentence that names the file and the cause."""
    try:
        save_latents(path, latents, fps, settings)
    except OSError as fault:
        return f"the finished latents could not be kept in {path}: {fault.strerror or fault}"
    return None


def load_latents(path: str | Path) -> tuple[Tensor, int, dict[str, Any]]:
    """(latents float32 [B, C, T, Y, X], fps, settings). Raises CheckpointError or DamagedFile if the file is not one of
    `save_latents`, or not as it was written, or its values are not finite."""
    with naming(short_path(Path(path))):
        check_latents_file(Path(path))
        opened = open_checkpoint(path)
        info = opened.tensors.get("latents")
        if info is None or len(info.shape) != 5 or info.packing or not info.dtype.is_floating_point:
            raise CheckpointError(
                "these are not saved latents: a floating point tensor `latents` of 5 dimensions is expected"
            )
        count = math.prod(info.shape)
        if not 0 < count <= MAX_LATENTS:
            raise CheckpointError(f"latents of {list(info.shape)}, {count} numbers: 1 to {MAX_LATENTS} can be read")
        fps, settings = _settings(opened.metadata)
        latents = opened.read("latents").float()
        if not all(math.isfinite(extreme) for extreme in latents.aminmax()):
            raise CheckpointError("its latents are not finite numbers: the file is damaged")
    return latents, fps, settings


def check_latents_file(path: Path) -> None:
    """Raise CheckpointError or OptionError if a file is missing, too large, or not as it was written."""
    try:
        check_file_size(path, 4 * MAX_LATENTS + MAX_HEADER)
        sealed = check_seal(path)
    except OSError as fault:
        raise CheckpointError(f"cannot be read ({fault.strerror})") from fault
    if not sealed:
        raise CheckpointError("it has no checksum, which finished latents have: whether it is damaged is not known")


def _settings(metadata: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
    """The frame rate and the settings of the run that a file of latents has."""
    text = metadata.get("settings", "")
    if len(text) > MAX_JSON:
        raise CheckpointError(f"its settings have {len(text)} characters, at most {MAX_JSON} are read")
    try:
        fps, settings = int(metadata["fps"]), json.loads(text)
    except (KeyError, ValueError, RecursionError) as fault:
        raise CheckpointError(
            f"latents without fps and settings in the metadata ({fault}): the file is not from `generate`"
        ) from fault
    if not 1 <= fps <= 1000 or not isinstance(settings, dict):
        raise CheckpointError(
            f"latents with {str(fps)[:20]} frames per second and settings of {type(settings).__name__}: 1 to 1000 and a"
            " dict are expected. The file is not from `generate`."
        )
    return fps, settings

"""Which file or folder of a release is which part of the model.

| part         | official release              | Diffusers release | packed by `save`               |
|--------------|-------------------------------|-------------------|--------------------------------|
| high         | high_noise_model/, or (TI2V-5B) shards in the root | transformer/      | high_noise_model.safetensors |
| low          | low_noise_model/              | transformer_2/    | low_noise_model.safetensors    |
| text_encoder | models_t5_*.pth               | text_encoder/     | text_encoder.safetensors       |
| vae          | Wan2.1_VAE.pth, Wan2.2_VAE.pth | vae/             | vae.safetensors                |
| clip_vision  | models_clip_*.pth             | image_encoder/    | clip_vision_h.safetensors      |
| audio_encoder | wav2vec2-large-xlsr-53-english/ |                 | wav2vec2_*.safetensors         |
| tokenizer    | google/umt5-xxl/spiece.model  | tokenizer/spiece.model | inside text_encoder       |
"""

from __future__ import annotations

import os
from pathlib import Path

from wan_core.checkpoint.errors import CheckpointError
from wan_core.checkpoint.opened import short_path

_PATTERNS: dict[str, tuple[str, ...]] = {
    "high": (
        "high_noise_model",
        "transformer",
        "high_noise_model.safetensors",
        "diffusion_pytorch_model.safetensors.index.json",
        "diffusion_pytorch_model.safetensors",
    ),
    "low": ("low_noise_model", "transformer_2", "low_noise_model.safetensors"),
    "text_encoder": ("models_t5_*.pth", "text_encoder", "text_encoder.safetensors"),
    "vae": ("Wan2.[0-9]_VAE.pth", "vae", "vae.safetensors"),
    "clip_vision": ("models_clip_*.pth", "image_encoder", "clip_vision_h.safetensors"),
    "audio_encoder": ("wav2vec2-large-xlsr-53-english", "wav2vec2_*.safetensors"),
    "tokenizer": ("google/umt5-xxl/spiece.model", "tokenizer/spiece.model", "spiece.model"),
}


def find_parts(folder: str | os.PathLike[str]) -> dict[str, Path]:
    """The parts of the release in `folder`: some of the keys high, low, text_encoder, vae, clip_vision,
    audio_encoder, tokenizer, in that order.

    A model with one transformer has it under `high`. Parts that are absent have no key. Only names are looked at,
    nothing is opened. Raises `CheckpointError` if `folder` is not a folder.
    """
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError(f"not a folder ({root})", where=short_path(root))
    parts: dict[str, Path] = {}
    for part, patterns in _PATTERNS.items():
        found = next((path for pattern in patterns for path in sorted(root.glob(pattern))), None)
        if found is not None:
            parts[part] = found
    return parts

"""Finished latents on disk: written before they are decoded, so that a failed decode loses nothing.

One safetensors file: tensor `latents` float32 [B, C, T, Y, X], un-normalised as on ComfyUI's LATENT socket; metadata
`fps` and `settings` (JSON, what made them).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from wan_core.checkpoint import CheckpointError, open_checkpoint


def save_latents(path: str | Path, latents: Tensor, fps: int, settings: Mapping[str, Any]) -> None:
    """Write latents [B, C, T, Y, X]. The file appears under its name only when it is whole."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(
            {"latents": latents.float().cpu().contiguous()},
            partial,
            {"fps": str(fps), "settings": json.dumps(settings)},
        )
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_latents(path: str | Path) -> tuple[Tensor, int, dict[str, Any]]:
    """(latents float32 [B, C, T, Y, X], fps, settings). Raises CheckpointError if the file is not one of
    `save_latents`."""
    with open_checkpoint(path) as opened:
        info = opened.tensors.get("latents")
        if info is None or len(info.shape) != 5:
            raise CheckpointError(
                "these are not saved latents: a tensor `latents` of 5 dimensions is expected", where=opened.describe()
            )
        fps = opened.metadata.get("fps", "16")
        return (
            opened.read("latents").float(),
            int(fps) if fps.isdecimal() else 16,
            json.loads(opened.metadata.get("settings", "{}")),
        )

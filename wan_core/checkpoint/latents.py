"""Files of finished latents, written before decoding, so that a failed decode loses nothing.

One safetensors file: tensor `latents` float32 [B, C, T, Y, X], un-normalised as on ComfyUI's LATENT socket; metadata
`fps` and `settings` (JSON, the settings of the run).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from wan_core.checkpoint import CheckpointError, open_checkpoint
from wan_core.checkpoint.save import write_safetensors


def save_latents(path: str | Path, latents: Tensor, fps: int, settings: Mapping[str, Any]) -> None:
    """Write latents [B, C, T, Y, X]. The file gets its name only when it is complete."""
    metadata = {"fps": str(fps), "settings": json.dumps(settings)}
    write_safetensors({"latents": latents.float()}, path, metadata)


def try_to_save_latents(path: str | Path, latents: Tensor, fps: int, settings: Mapping[str, Any]) -> str | None:
    """As `save_latents`, but a disk that is full or read-only is no error: the latents are still in memory, and the
    video can be made. Returns None, or a sentence that names the file and the cause."""
    try:
        save_latents(path, latents, fps, settings)
    except OSError as fault:
        return f"the finished latents could not be kept in {path}: {fault.strerror or fault}"
    return None


def load_latents(path: str | Path) -> tuple[Tensor, int, dict[str, Any]]:
    """(latents float32 [B, C, T, Y, X], fps, settings). Raises CheckpointError if the file is not one of
    `save_latents`."""
    with open_checkpoint(path) as opened:
        info = opened.tensors.get("latents")
        if info is None or len(info.shape) != 5:
            raise CheckpointError(
                "these are not saved latents: a tensor `latents` of 5 dimensions is expected", where=opened.describe()
            )
        try:
            fps, settings = int(opened.metadata["fps"]), json.loads(opened.metadata["settings"])
        except (KeyError, ValueError) as fault:
            raise CheckpointError(
                f"latents without fps and settings in the metadata ({fault}): the file is not from `generate`",
                where=opened.describe(),
            ) from fault
        return opened.read("latents").float(), fps, settings

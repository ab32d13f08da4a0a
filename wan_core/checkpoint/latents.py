"""Files of finished latents, written before decoding, so that a failed decode loses nothing.

One safetensors file: tensor `latents` float32 [B, C, T, Y, X], un-normalised as on ComfyUI's LATENT socket; metadata
`fps` and `settings` (JSON, the settings of the run).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from wan_core.checkpoint import CheckpointError, open_checkpoint
from wan_core.checkpoint.save import write_safetensors
from wan_core.config.limits import MAX_JSON, MAX_LATENTS


def save_latents(path: str | Path, latents: Tensor, fps: int, settings: Mapping[str, Any]) -> None:
    """Write latents [B, C, T, Y, X]. The file gets its name only when it is complete."""
    metadata = {"fps": str(fps), "settings": json.dumps(settings)}
    write_safetensors({"latents": latents.float()}, path, metadata)


def try_to_save_latents(path: str | Path, latents: Tensor, fps: int, settings: Mapping[str, Any]) -> str | None:
    """Like `save_latents`, but a full or read-only disk is no error: the latents are still in memory, and the
    video can be made. Returns None, or a sentence that names the file and the cause."""
    try:
        save_latents(path, latents, fps, settings)
    except OSError as fault:
        return f"the finished latents could not be kept in {path}: {fault.strerror or fault}"
    return None


def load_latents(path: str | Path) -> tuple[Tensor, int, dict[str, Any]]:
    """(latents float32 [B, C, T, Y, X], fps, settings). Raises CheckpointError if the file is not one of
    `save_latents`, or its values are not finite."""
    with open_checkpoint(path) as opened:
        where = opened.describe()
        info = opened.tensors.get("latents")
        if info is None or len(info.shape) != 5 or info.packing or not info.dtype.is_floating_point:
            raise CheckpointError(
                "these are not saved latents: a floating point tensor `latents` of 5 dimensions is expected",
                where=where,
            )
        count = math.prod(info.shape)
        if not 0 < count <= MAX_LATENTS:
            raise CheckpointError(
                f"latents of {list(info.shape)}, {count} numbers: 1 to {MAX_LATENTS} can be read", where=where
            )
        fps, settings = _settings(opened.metadata, where)
        latents = opened.read("latents").float()
    if not all(math.isfinite(extreme) for extreme in latents.aminmax()):
        raise CheckpointError("its latents are not finite numbers: the file is damaged", where=where)
    return latents, fps, settings


def _settings(metadata: Mapping[str, str], where: str) -> tuple[int, dict[str, Any]]:
    """The frame rate and the settings of the run that a file of latents has."""
    text = metadata.get("settings", "")
    if len(text) > MAX_JSON:
        raise CheckpointError(f"its settings have {len(text)} characters, at most {MAX_JSON} are read", where=where)
    try:
        fps, settings = int(metadata["fps"]), json.loads(text)
    except (KeyError, ValueError, RecursionError) as fault:
        raise CheckpointError(
            f"latents without fps and settings in the metadata ({fault}): the file is not from `generate`", where=where
        ) from fault
    if not 1 <= fps <= 1000 or not isinstance(settings, dict):
        raise CheckpointError(
            f"latents with {str(fps)[:20]} frames per second and settings of {type(settings).__name__}: 1 to 1000 and a"
            " dict are expected. The file is not from `generate`.",
            where=where,
        )
    return fps, settings

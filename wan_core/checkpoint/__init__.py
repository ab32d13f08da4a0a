"""Model files: open them, say what they are, load them, save them."""

from __future__ import annotations

from wan_core.checkpoint.detect import Detected, detect
from wan_core.checkpoint.load import load_dit, load_text_encoder, load_vae
from wan_core.checkpoint.opened import Checkpoint, CheckpointError, TensorInfo
from wan_core.checkpoint.reader import Source, find_parts, open_checkpoint
from wan_core.checkpoint.save import save

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Detected",
    "Source",
    "TensorInfo",
    "detect",
    "find_parts",
    "load_dit",
    "load_text_encoder",
    "load_vae",
    "open_checkpoint",
    "save",
]

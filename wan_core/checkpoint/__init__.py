"""Model files: open them, say what they are, load them, save them."""

from __future__ import annotations

from wan_core.checkpoint.detect import Detected, detect
from wan_core.checkpoint.errors import CheckpointError
from wan_core.checkpoint.folder import find_parts
from wan_core.checkpoint.load import load_dit, load_text_encoder, load_vae
from wan_core.checkpoint.opened import Checkpoint, TensorInfo
from wan_core.checkpoint.reader import Source, open_checkpoint
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

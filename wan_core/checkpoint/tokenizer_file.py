"""The tokenizer of a text encoder: from a file that is named, the encoder's own file, or spiece.model beside it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from wan_core.checkpoint.detect import TOKENIZER, Detected
from wan_core.checkpoint.opened import CheckpointError
from wan_core.models.text.tokenizer import Tokenizer
from wan_core.models.wan.families.plain import number

_BESIDE = (
    "google/umt5-xxl/spiece.model",
    "spiece.model",
    "tokenizer/spiece.model",
    "../tokenizer/spiece.model",
    "../google/umt5-xxl/spiece.model",
)


def find_tokenizer(detected: Detected, path: Path | None) -> Tokenizer:
    """The tokenizer of an encoder. path: a spiece.model or a folder that holds one. Raises `CheckpointError`."""
    checkpoint = detected.checkpoint
    try:
        if path is not None:
            return Tokenizer.from_file(_spiece(path))
        if checkpoint.tokenizer is not None:
            return Tokenizer(checkpoint.tokenizer())
        if TOKENIZER in detected.extras:
            proto = _embedded(checkpoint.read(detected.extras[TOKENIZER]))
            return Tokenizer(proto, int(number(checkpoint.metadata, "max_length", 512)))
        if checkpoint.path is not None:
            folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
            tokenizer_file = next((folder / name for name in _BESIDE if (folder / name).is_file()), None)
            if tokenizer_file is not None:
                return Tokenizer.from_file(tokenizer_file)
    except (ValueError, OSError) as fault:
        raise CheckpointError(f"its tokenizer cannot be used: {fault}") from fault
    raise CheckpointError(
        "a text encoder without its tokenizer. Put spiece.model (from google/umt5-xxl) beside the file, or name it."
    )


def _spiece(path: Path) -> Path:
    """The file itself, or the one in a folder: `tokenizer/`, `google/umt5-xxl/` or a whole release."""
    if not path.is_dir():
        return path
    return next((path / name for name in _BESIDE[:3] if (path / name).is_file()), path / "spiece.model")


def _embedded(stored: Tensor) -> bytes:
    if stored.dtype not in (torch.uint8, torch.int8) or stored.ndim != 1:
        raise ValueError(
            f"the embedded {TOKENIZER} is {stored.dtype} {list(stored.shape)}, and a list of bytes is expected"
        )
    return stored.contiguous().numpy().tobytes()

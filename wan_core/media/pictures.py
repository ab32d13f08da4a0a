"""Writing pictures. The format follows from the name's ending."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from wan_core.config import OptionError
from wan_core.config.limits import MAX_SIDE
from wan_core.config.outputs import written_beside


def check_picture_name(path: str | os.PathLike[str]) -> None:
    """Raise OptionError now if `save_picture` knows no format for this name: before hours of work, not after."""
    picture_format(path)


def picture_format(path: str | os.PathLike[str]) -> str:
    """Pillow's name of the format that the ending of `path` names. Raises OptionError."""
    found = Image.registered_extensions().get(Path(path).suffix.lower(), "")
    try:
        Image.new("RGB", (8, 8)).save(io.BytesIO(), format=found)
    except (OSError, ValueError, KeyError) as fault:
        raise OptionError(
            f"cannot write the picture {path}: no format for coloured pictures has this ending; use .png"
        ) from fault
    return found


def save_picture(image: Image.Image, path: str | os.PathLike[str]) -> Path:
    """Write `image`, beside and then renamed. Raises OptionError for a name without a format, and OSError."""
    kind = picture_format(path)
    with written_beside(path) as temporary:
        image.save(temporary, format=kind)
    return Path(path)


def write_sheet(path: str | os.PathLike[str], frames: NDArray[np.uint8], *, columns: int = 6, gap: int = 4) -> Path:
    """Frames from the first to the last side by side, as one picture.

    frames: uint8 [F, H, W, 3]; `columns` of them are shown, evenly spaced, or as many as a picture has room for
    (`MAX_SIDE`). Small ones are doubled. Raises as `save_picture` does.
    """
    height, width = frames.shape[1:3]
    scale = 2 if height < 192 and 2 * width <= MAX_SIDE else 1
    room = max(1, (MAX_SIDE + gap) // (scale * width + gap))
    chosen = frames[np.linspace(0, len(frames) - 1, min(columns, room, len(frames))).round().astype(int)]
    chosen = chosen.repeat(scale, axis=1).repeat(scale, axis=2)
    padded = np.pad(chosen, ((0, 0), (0, 0), (0, gap), (0, 0)), constant_values=255)
    return save_picture(Image.fromarray(np.concatenate(list(padded), axis=1)[:, :-gap]), path)

"""The formats of a video by the ending of its name: MP4, and a folder of PNG files without one.

Legend: F frames, H rows, W columns; colours are red, green, blue, full range.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from wan_core.config import OptionError
from wan_core.config.checks import meant_hint
from wan_core.config.outputs import folder_beside
from wan_core.media.mp4 import checked_frame, checked_rate, write_mp4
from wan_core.media.sound import Sound

Frames = Iterable[NDArray[np.uint8]]
Write = Callable[[Path, Frames, Fraction, Mapping[str, str]], object]
FRAME_NAME = "{:05}.png"  # from 1


def write_video(
    path: str | os.PathLike[str],
    frames: Frames,
    *,
    fps: float | Fraction,
    sound: Sound | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write the frames [H, W, 3], one at a time, in the format of the name; what was there before is replaced at the
    end, after an error nothing. metadata: the settings of this video, which every format keeps: see `read_metadata`
    (a folder has them in its first picture). Raises OptionError and OSError, as `write_mp4` does."""
    path = Path(path)
    check_sound(path, sound is not None)
    if sound is not None:
        return write_mp4(path, frames, fps=fps, sound=sound, metadata=metadata or {})
    find_format(path)(path, frames, checked_rate(fps), metadata or {})
    return path


def check_sound(path: Path, sounds: bool) -> None:
    """Raise OptionError where a video with sound gets a name of a format that is written without."""
    if sounds and path.suffix.lower() != ".mp4":
        raise OptionError(f"cannot write the sound to {path.name!r}: give the video a name that ends in .mp4")


def find_format(path: Path) -> Write:
    """Raises OptionError for a name whose ending is not known: before hours of work, not after."""
    ending = path.suffix.lower()
    if ending not in FORMATS:
        raise OptionError(
            f"cannot write {path.name!r}: give the file a name that ends in .mp4, or one without ending for a folder "
            f"of PNG files{meant_hint(ending, FORMATS)}"
        )
    return FORMATS[ending]


def is_folder(path: Path) -> bool:
    """Whether a video of this name is a folder of pictures."""
    return find_format(path) is _write_pngs


def _write_mp4(path: Path, frames: Frames, rate: Fraction, metadata: Mapping[str, str]) -> None:
    write_mp4(path, frames, fps=rate, metadata=metadata)


def _write_pngs(path: Path, frames: Frames, rate: Fraction, metadata: Mapping[str, str]) -> None:
    comment, count = PngImagePlugin.PngInfo(), 0
    comment.add_text("comment", json.dumps({**metadata, "fps": str(rate)}))
    with folder_beside(path, FRAME_NAME.format(1)) as temporary:
        for count, frame in enumerate(frames, 1):
            picture = _picture(frame, count - 1)
            picture.save(
                temporary / FRAME_NAME.format(count), pnginfo=comment if count == 1 else None, compress_level=4
            )
        if not count:
            raise OptionError("no frames were given: a video has at least one")


def _picture(frame: NDArray[np.uint8], index: int) -> Image.Image:
    return Image.fromarray(checked_frame(np.asarray(frame), index, None))


# ending -> function that writes it
FORMATS: dict[str, Write] = {".mp4": _write_mp4, "": _write_pngs}

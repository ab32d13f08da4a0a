"""The formats of a video by the ending of its name: MP4, and a folder of PNG files without one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from wan_core.config import OptionError
from wan_core.config.checks import meant_hint
from wan_core.config.outputs import folder_beside
from wan_core.media.mp4 import NO_FRAMES, checked_frame, checked_rate, write_mp4
from wan_core.media.sound import Sound

FRAME_NAME = "{:05}.png"  # from 1


def write_video(
    path: str | os.PathLike[str],
    frames: Iterable[NDArray[np.uint8]],
    *,
    fps: float | Fraction,
    sound: Sound | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write the frames [H, W, 3], one at a time, in the format of the name; what was there before is replaced at the
    end, after an error nothing. metadata: the settings of this video, which every format keeps: see `read_metadata`
    (a folder has them in its first picture). Raises OptionError and OSError, as `write_mp4` does."""
    path = Path(path)
    if not is_folder(path, sound is not None):
        return write_mp4(path, frames, fps=fps, sound=sound, metadata=metadata or {})
    first, count = PngImagePlugin.PngInfo(), 0
    first.add_text("comment", json.dumps({**(metadata or {}), "fps": str(checked_rate(fps))}))
    with folder_beside(path) as temporary:
        for count, frame in enumerate(frames, 1):
            picture = Image.fromarray(checked_frame(np.asarray(frame), count - 1, None))
            comment = first if count == 1 else None
            picture.save(temporary / FRAME_NAME.format(count), pnginfo=comment, compress_level=4)
        if not count:
            raise OptionError(NO_FRAMES)
    return path


def is_folder(path: Path, sounds: bool = False) -> bool:
    """Whether a video of this name is a folder of pictures. Raises OptionError for an ending that is not known, and for
    a folder where the video has sound: before hours of work, not after."""
    ending = path.suffix.lower()
    if ending not in ("", ".mp4"):
        raise OptionError(
            f"cannot write {path.name!r}: give the file a name that ends in .mp4, or one without ending for a folder "
            f"of PNG files{meant_hint(ending, ['.mp4'])}"
        )
    if sounds and not ending:
        raise OptionError(f"cannot write the sound to {path.name!r}: give the video a name that ends in .mp4")
    return not ending

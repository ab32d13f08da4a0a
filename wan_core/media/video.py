"""Reading video and image files, with PyAV and Pillow, as NumPy arrays. `mp4` writes them.

Legend: F frames, H rows, W columns; colours are red, green, blue, full range.
"""

from __future__ import annotations

import json
import os
from functools import cache
from typing import NamedTuple

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from wan_core.config import OptionError
from wan_core.config.checks import check_picture_size
from wan_core.config.limits import MAX_DRIVING, MAX_FRAME, MAX_FRAMES, MAX_JSON, MAX_SIDE, MAX_VIDEO
from wan_core.media.opening import open_picture, open_video

STRIP = 256  # rows of a picture that are converted at once, so that the bytes of a large one never exist twice
GROWTH = 8  # frames for which room is made at once while a video is read


def read_video(
    path: str | os.PathLike[str],
    *,
    max_frames: int | None = None,
    max_frame: int = MAX_FRAME,
    max_pixels: int = MAX_VIDEO,
) -> NDArray[np.uint8]:
    """The frames of an MP4, MOV, MKV, WebM, AVI or GIF file: uint8 [F, H, W, 3], at most `max_frames` of them, turned
    as the file says (videos of phones).

    Raises OptionError if the file is missing, not a video, damaged, or has more than `max_frame` pixels in a frame or
    `max_pixels` in all.
    """
    if max_frames is not None and max_frames < 1:
        raise OptionError(f"max_frames {max_frames} is not allowed; use 1 or more, or leave it out")
    video, count = np.empty((0, 0, 0, 3), np.uint8), 0
    with open_video(path) as container:
        if not container.streams.video:
            raise OptionError(f"{path} holds no video, only other streams")
        for frame in container.decode(video=0):
            width, height = _check_amount(path, frame, count, video.shape, max_frame, max_pixels)
            if count == len(video):  # grows in place, so that memory holds each frame once
                video.resize((count + GROWTH, height, width, 3), refcheck=False)
            video[count] = np.rot90(frame.to_ndarray(format="rgb24"), _quarters(frame))
            count += 1
            if count == max_frames:
                break
    if not count:
        raise OptionError(f"cannot read {path} as a video (it holds no frames)")
    video.resize((count, *video.shape[1:]), refcheck=False)
    return video


def video_size(path: str | os.PathLike[str], most: int) -> tuple[int, int, int]:
    """(width, height, frames) of what `read_video` gives with at most so many frames, which it decodes: so damage is
    found now. Raises as it does."""
    frames, height, width, _ = read_video(path, max_frames=most).shape
    return width, height, frames


class VideoFacts(NamedTuple):
    """fps: frames per second, of all of the video."""

    width: int
    height: int
    frames: int
    fps: float


def video_facts(path: str | os.PathLike[str]) -> VideoFacts:
    """What a long video is. Decodes it once, so that damage is found now. Raises OptionError as `read_video` does."""
    try:
        status = os.stat(path)
    except OSError as fault:
        raise OptionError(f"cannot read {path} ({fault.strerror})") from fault
    return _facts(os.fspath(path), status.st_size, status.st_mtime_ns)


@cache
def _facts(path: str, size: int, changed: int) -> VideoFacts:
    count, width, height = 0, 0, 0
    with open_video(path) as container:
        if not container.streams.video:
            raise OptionError(f"{path} holds no video, only other streams")
        rate = container.streams.video[0].average_rate
        for frame in container.decode(video=0):
            shape = (count, height, width, 3) if count else (0, 0, 0, 0)
            width, height = _check_amount(path, frame, count, shape, MAX_FRAME, MAX_DRIVING)
            count += 1
    if not count or not rate:
        raise OptionError(f"cannot read {path} as a video (it holds no frames, or no frame rate)")
    return VideoFacts(width, height, count, float(rate))


def _check_amount(
    path: str | os.PathLike[str],
    frame: av.VideoFrame,
    count: int,
    shape: tuple[int, ...],
    max_frame: int,
    max_pixels: int,
) -> tuple[int, int]:
    """(width, height) of a frame as it is shown. Raises OptionError where one more after `count` is too much, or
    differs in size from the first: [F, H, W, 3] in `shape`."""
    width, height = (frame.height, frame.width) if _quarters(frame) % 2 else (frame.width, frame.height)
    if not 0 < width * height <= max_frame or max(width, height) > MAX_SIDE:
        raise OptionError(
            f"{path} has frames of {width}x{height} pixels: 1 to {max_frame} pixels can be read here, and at most "
            f"{MAX_SIDE} in each direction"
        )
    if count and shape[1:3] != (height, width):
        raise OptionError(f"{path}: frame {count} has {width}x{height} pixels, the first {shape[2]}x{shape[1]}")
    allowed = min(MAX_FRAMES, max_pixels // (width * height))
    if count >= allowed:
        raise OptionError(f"{path} has more than {allowed} frames of {width}x{height} pixels: cut it first")
    return width, height


def _quarters(frame: av.VideoFrame) -> int:
    """By how many quarters a frame is turned to the left before it is shown."""
    return round(frame.rotation / 90)


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The `metadata` that `write_mp4` or `write_video` stored; empty if another program wrote the file. Raises as
    `read_video` does."""
    with open_video(path) as container:
        metadata = {key.lower(): value for key, value in container.metadata.items()}  # COMMENT in Matroska
        comment = metadata.get("comment", "").encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if len(comment) > MAX_JSON:
        return {}
    try:
        metadata = json.loads(comment)
    except (ValueError, RecursionError):  # a comment of another program
        return {}
    return metadata if isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()) else {}


def load_image(path: str | os.PathLike[str], size: tuple[int, int] | None = None) -> NDArray[np.float32]:
    """A picture as float32 [H, W, 3] in 0..1.

    Turned as its EXIF orientation says; transparent parts become black; of an animation, the first frame. With `size`
    (width, height) the picture is scaled (Lanczos) to cover it and what sticks out is cut off, the same on both sides.

    Raises OptionError if the file is missing, not a picture or damaged, or `size` is not two positive numbers.
    """
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise OptionError(f"size {size} is not allowed; use (width, height), both 1 or more")
    with open_picture(path) as file:
        image = _to_rgb(file)
    return _to_pixels(image if size is None else ImageOps.fit(image, size, Image.Resampling.LANCZOS))


def picture_size(path: str | os.PathLike[str]) -> tuple[int, int]:
    """(width, height) of the picture that `load_image` gives. Decodes it once, so that damage is found now. Raises as
    `load_image` does."""
    with open_picture(path) as file:
        return _to_rgb(file).size


def fit_image(pixels: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    """Pixels [H, W, 3] in 0..1, scaled and cropped to `size` (width, height) as in `load_image`. Raises OptionError for
    a picture that `load_image` would not read."""
    if (pixels.shape[1], pixels.shape[0]) == tuple(size):
        return pixels
    check_picture_size(pixels.shape[1], pixels.shape[0])
    image = Image.fromarray((pixels.clip(0, 1) * 255).round().astype(np.uint8))
    return _to_pixels(ImageOps.fit(image, size, Image.Resampling.LANCZOS))


def _to_pixels(image: Image.Image) -> NDArray[np.float32]:
    pixels = np.empty((image.height, image.width, 3), np.float32)
    for top in range(0, image.height, STRIP):
        strip = image.crop((0, top, image.width, min(top + STRIP, image.height)))
        np.divide(np.asarray(strip), np.float32(255), out=pixels[top : top + STRIP], dtype=np.float32)
    return pixels


def _to_rgb(image: Image.Image) -> Image.Image:
    """The picture, turned as it was taken and without transparency. `image` is changed: memory has few copies of it."""
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow's own conversion would clip at 255
        wide = np.asarray(image)
        grey = np.empty(wide.shape, np.uint8)
        for top in range(0, len(wide), STRIP):
            grey[top : top + STRIP] = (wide[top : top + STRIP].clip(0, 65535) / 257).round()
        image = Image.fromarray(grey)
    if image.has_transparency_data:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, (0, 0, 0, 255)), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")

"""Video and image files: H.264 in MP4 with PyAV, pictures with Pillow. NumPy in, NumPy out.

Legend: F frames, H rows, W columns; colours are red, green, blue, full range.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import ColorRange, Colorspace
from numpy.typing import NDArray
from PIL import Image, ImageOps

from wan_core.config import OptionError
from wan_core.config.limits import MAX_FRAME, MAX_FRAMES, MAX_JSON, MAX_VIDEO
from wan_core.config.outputs import check_place, written_beside
from wan_core.media.opening import open_picture, open_video

STRIP = 256  # rows of a picture that are converted at once, so that the bytes of a large one never exist twice
GROWTH = 8  # frames for which room is made at once while a video is read
_BT709 = 1  # the H.264 number of these primaries, this transfer and this matrix


def write_mp4(
    path: str | os.PathLike[str],
    frames: Iterable[NDArray[np.uint8]],
    *,
    fps: float | Fraction,
    crf: int = 17,
    metadata: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
) -> Path:
    """Write H.264 (libx264, yuv420p, BT.709) atomically.

    The file is written under a temporary name in the same folder and renamed when complete. After an error (also one of
    `frames`), an older file of that name is unchanged and the temporary file is deleted.

    Args:
        path: must end in `.mp4`. An existing file is replaced.
        frames: uint8 [F, H, W, 3], or any iterable of uint8 [H, W, 3], taken one at a time. H and W even.
        fps: frames per second; a fraction such as 30000 / 1001 is kept exactly.
        crf: quality, 0 (lossless except for colour subsampling) to 51 (worst).
        metadata: the settings of this video, stored as one JSON object in the file's `comment`: see `read_metadata`.
        tags: further metadata entries. ComfyUI reads `workflow` and `prompt` there.

    Returns:
        `path`.

    Raises:
        OptionError: the path, rate, quality, or a frame's shape or dtype is not usable, or there are no frames.
        OSError: the disk is full.
    """
    path = Path(path)
    rate = _checked_rate(fps)
    check_video_name(path)
    if not isinstance(crf, int) or not 0 <= crf <= 51:
        raise OptionError(f"crf {crf!r} is not allowed; use an integer of 0 (best) to 51 (worst), such as 17")
    check_place(path)
    tagged = {**(tags or {}), "comment": json.dumps(dict(metadata or {}))}
    with written_beside(path) as temporary:
        _encode(temporary, frames, rate, crf, tagged)
    return path


def check_video_name(path: Path) -> None:
    """Raise OptionError now if `write_mp4` could not write a file of this name: before hours of work, not after."""
    if path.suffix.lower() != ".mp4":
        raise OptionError(f"cannot write {path.name!r}: only MP4 is supported; give the file a name that ends in .mp4")


def _checked_rate(fps: float | Fraction) -> Fraction:
    if not math.isfinite(fps) or not 0.01 <= fps <= 1000:
        raise OptionError(f"fps {fps} is not allowed; use 0.01 to 1000 frames per second, such as 16")
    return Fraction(fps).limit_denominator(1001)


def _encode(path: Path, frames: Iterable[NDArray[np.uint8]], rate: Fraction, crf: int, tags: Mapping[str, str]) -> None:
    size = None
    options = {"movflags": "faststart+use_metadata_tags"}  # index at the start, for streaming; tags with any name
    with av.open(str(path.absolute()), "w", format="mp4", options=options) as container:
        container.metadata.update(tags)
        stream = container.add_stream("libx264", rate=rate, options={"crf": str(crf), "preset": "medium"})
        for index, frame in enumerate(frames):
            array = _checked_frame(np.asarray(frame), index, size)
            if size is None:
                size = array.shape[:2]
                stream.height, stream.width = size
                stream.pix_fmt = "yuv420p"
                # Stored in the file, because players otherwise guess it from the picture's size and change the colours.
                stream.codec_context.color_primaries = _BT709
                stream.codec_context.color_trc = _BT709
                stream.codec_context.colorspace = _BT709
                stream.codec_context.color_range = ColorRange.MPEG
            container.mux(stream.encode(_to_yuv(array, index, rate)))
        if size is None:
            raise OptionError("no frames were given: a video has at least one")
        container.mux(stream.encode(None))


def _checked_frame(array: np.ndarray, index: int, size: tuple[int, int] | None) -> NDArray[np.uint8]:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise OptionError(f"frame {index} is {array.dtype} {list(array.shape)}; uint8 [height, width, 3] is needed")
    height, width = array.shape[:2]
    if size is not None and (height, width) != size:
        raise OptionError(f"frame {index} has {width}x{height} pixels, but the first has {size[1]}x{size[0]}")
    if height % 2 or width % 2 or not height or not width:
        raise OptionError(f"a video of {width}x{height} pixels cannot be written as H.264: both must be even")
    return array


def _to_yuv(array: NDArray[np.uint8], index: int, rate: Fraction) -> av.VideoFrame:
    rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(array), format="rgb24")
    frame = rgb.reformat(
        format="yuv420p",
        src_color_range=ColorRange.JPEG,
        dst_colorspace=Colorspace.ITU709,
        dst_color_range=ColorRange.MPEG,
    )
    frame.pts, frame.time_base = index, 1 / rate
    return frame


# ------------------------------------------------------------------------------------------------------------ reading


def read_video(
    path: str | os.PathLike[str],
    *,
    max_frames: int | None = None,
    max_frame: int = MAX_FRAME,
    max_pixels: int = MAX_VIDEO,
) -> NDArray[np.uint8]:
    """The frames of an MP4, MOV, MKV, WebM, AVI or GIF file: uint8 [F, H, W, 3], at most `max_frames` of them.

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
            _check_amount(path, frame, count, video.shape, max_frame, max_pixels)
            if count == len(video):  # grows in place, so that memory holds each frame once
                video.resize((count + GROWTH, frame.height, frame.width, 3), refcheck=False)
            video[count] = frame.to_ndarray(format="rgb24")
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


def _check_amount(
    path: str | os.PathLike[str],
    frame: av.VideoFrame,
    count: int,
    shape: tuple[int, ...],
    max_frame: int,
    max_pixels: int,
) -> None:
    """Raise OptionError where one more frame after `count` is too much, or differs in size from the first: [F, H, W, 3]
    in `shape`."""
    width, height = frame.width, frame.height
    if not 0 < width * height <= max_frame:
        raise OptionError(f"{path} has frames of {width}x{height} pixels: 1 to {max_frame} pixels can be read here")
    if count and shape[1:3] != (height, width):
        raise OptionError(f"{path}: frame {count} has {width}x{height} pixels, the first {shape[2]}x{shape[1]}")
    allowed = min(MAX_FRAMES, max_pixels // (width * height))
    if count >= allowed:
        raise OptionError(f"{path} has more than {allowed} frames of {width}x{height} pixels: cut it first")


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The `metadata` that `write_mp4` stored; empty if another program wrote the file. Raises as `read_video` does."""
    with open_video(path) as container:
        comment = container.metadata.get("comment", "")
    if len(comment) > MAX_JSON:
        return {}
    try:
        found = json.loads(comment)
    except (ValueError, RecursionError):  # a comment of another program
        return {}
    return found if isinstance(found, dict) and all(isinstance(value, str) for value in found.values()) else {}


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
    """Pixels [H, W, 3] in 0..1, scaled and cropped to `size` (width, height) as in `load_image`."""
    if (pixels.shape[1], pixels.shape[0]) == tuple(size):
        return pixels
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

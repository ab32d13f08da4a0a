"""Reading video and image files, with PyAV and Pillow, as NumPy arrays. `mp4` writes them.

Legend: F frames, H rows, W columns; colours are red, green, blue, full range.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

import av
import numpy as np
from av.container import InputContainer
from numpy.typing import NDArray
from PIL import Image, ImageOps

from wan_core.config import OptionError
from wan_core.config.changes import until_changed
from wan_core.config.checks import check_picture_size
from wan_core.config.limits import MAX_DRIVING, MAX_FRAME, MAX_FRAMES, MAX_JSON, MAX_SECONDS, MAX_SIDE, MAX_VIDEO
from wan_core.media.opening import open_picture, open_video

STRIP = 256  # rows of a picture that are converted at once, so that the bytes of a large one never exist twice
GROWTH = 8  # frames for which room is made at once while a video is read


def read_video(
    path: str | os.PathLike[str], *, max_frame: int = MAX_FRAME, max_pixels: int = MAX_VIDEO
) -> NDArray[np.uint8]:
    """The frames of an MP4, MOV, MKV, WebM, AVI or GIF file: uint8 [F, H, W, 3], turned as the file says (videos of
    phones), with square pixels.

    Raises OptionError if the file is missing, not a video, damaged, or has more than `max_frame` pixels in a frame or
    `max_pixels` in all.
    """
    video, count = np.empty((0, 0, 0, 3), np.uint8), 0
    with open_video(path) as container:
        aspect = _pixel_aspect(path, container)
        for frame in container.decode(video=0):
            width, height = _check_amount(path, frame, aspect, count, video.shape, max_frame, max_pixels)
            if count == len(video):  # grows in place, so that memory holds each frame once
                video.resize((count + GROWTH, height, width, 3), refcheck=False)
            video[count] = _shown(frame, aspect)
            count += 1
    if not count:
        raise OptionError(f"cannot read {path} as a video (it holds no frames)")
    video.resize((count, *video.shape[1:]), refcheck=False)
    return video


def read_frames(path: str | os.PathLike[str], chosen: NDArray[np.int64]) -> Iterator[NDArray[np.uint8]]:
    """The frames [H, W, 3] of these numbers, which never fall, each as often as it is named. Raises OptionError as
    `read_video` does, with the limit of pixels of a driving video."""
    left, shape = chosen[::-1].tolist(), (0, 0, 0, 0)
    with open_video(path) as container:
        aspect = _pixel_aspect(path, container)
        for number, frame in enumerate(container.decode(video=0)):
            width, height = _check_amount(path, frame, aspect, number, shape, MAX_FRAME, MAX_DRIVING)
            shape = (number, height, width, 3)
            pixels = _shown(frame, aspect) if left and left[-1] == number else None
            while pixels is not None and left and left[-1] == number:
                left.pop()
                yield pixels
            if not left:
                return
    raise OptionError(f"{path} changed while it was read: frame {left[-1]} is missing")


class VideoFacts(NamedTuple):
    """The size and the times of a video. fps: frames per second, of a regular video the average, of another one the
    usual. seconds: how long it is shown. starts: seconds [F] at which frames begin, from the first on; None: all are as
    long as each other."""

    width: int
    height: int
    frames: int
    fps: float
    seconds: float
    starts: NDArray[np.float64] | None

    def frames_at(self, fps: float) -> NDArray[np.int64]:
        """Which frames a video of so many frames per second shows, by the times of both: of a regular video the nearest
        (`get_frame_indices` of Wan2.2), of another one what is shown then."""
        times = np.arange(max(1, int(self.seconds * fps + 1e-6))) / fps
        if self.starts is None:
            return np.round(times * self.fps).astype(np.int64).clip(0, self.frames - 1)
        half = 0.5 / max(self.fps, fps)  # so that jitter of times neither drops nor repeats a frame
        return np.searchsorted(self.starts, times + half, side="right") - 1


def short_video(path: str, count: int, frames: int, fps: int) -> str:
    """The note about a video that has `count` of the `frames` requested at `fps`."""
    return (
        f"{path} has {count} frames at {fps} frames per second, and {frames} are asked for: use a longer video, fewer "
        "frames or more of them per second"
    )


@until_changed(1024)
def video_facts(path: str | os.PathLike[str], until: float | None = None) -> VideoFacts:
    """What a long video is, or what it is up to a little more than `until` seconds. Decodes that once, so that damage
    is found now. Raises OptionError as `read_video` does, and for one that lasts too long."""
    width, height, starts, in_order, latest, end = 0, 0, list[float | None](), True, -(2**63), 0.0
    with open_video(path) as container:
        aspect, rate = _pixel_aspect(path, container), container.streams.video[0].average_rate
        for packet in container.demux(video=0):
            if packet.pts is not None and packet.time_base is not None:
                in_order = in_order and packet.pts >= latest  # else durations are those of the order of decoding
                latest, end = packet.pts, float((packet.pts + (packet.duration or 0)) * packet.time_base)
            for frame in packet.decode():
                shape = (len(starts), height, width, 3) if starts else (0, 0, 0, 0)
                width, height = _check_amount(path, frame, aspect, len(starts), shape, MAX_FRAME, MAX_DRIVING)
                starts.append(frame.time)
            if until is not None and starts and _begin(starts, float(rate or 1)) > until:
                break
    if not starts or not rate:
        raise OptionError(f"cannot read {path} as a video (it holds no frames, or no frame rate)")
    facts = _timed(width, height, float(rate), starts, end if in_order else 0.0)
    if facts.seconds > MAX_SECONDS:
        raise OptionError(f"{path} lasts {facts.seconds:.0f} seconds, and at most {MAX_SECONDS} are read: cut it first")
    return facts


JITTER = 0.002  # seconds by which frames of a regular video may be off: containers round times to milliseconds


def _begin(times: Sequence[float | None], rate: float) -> float:
    """When the last of these frames begins, in seconds after the first."""
    first, last = times[0], times[-1]
    return len(times) / rate if first is None or last is None else last - first


def _timed(width: int, height: int, rate: float, times: Sequence[float | None], end: float) -> VideoFacts:
    """The facts of a video of the average `rate`, whose frames begin at `times`. end: of the last one; 0: not known.
    Times that are missing or fall are not believed."""
    count, known = len(times), [time for time in times if time is not None]
    regular = VideoFacts(width, height, count, rate, count / rate, None)
    if len(known) < count:
        return regular
    starts, length = np.array(known) - known[0], end - known[0]
    steps = np.diff(starts)
    even = np.abs(starts - np.arange(count) / rate).max() <= JITTER and length < (count + 0.5) / rate
    if even or (steps < 0).any() or not (steps > 0).any():
        return regular
    usual = float(np.median(steps[steps > 0]))
    seconds = length if length > starts[-1] else float(starts[-1]) + usual
    return VideoFacts(width, height, count, 1 / usual, seconds, starts)


def _pixel_aspect(path: str | os.PathLike[str], container: InputContainer) -> Fraction:
    """How wide a pixel is, relative to its height. Raises OptionError where the container has no video."""
    if not container.streams.video:
        raise OptionError(f"{path} holds no video, only other streams")
    aspect = container.streams.video[0].sample_aspect_ratio
    return aspect if aspect and aspect > 0 else Fraction(1)


def _size_shown(frame: av.VideoFrame, aspect: Fraction) -> tuple[int, int]:
    """(width, height) of a frame with square pixels, before it is turned: its longer pixels are repeated."""
    if aspect >= 1:
        return round(frame.width * aspect), frame.height
    return frame.width, round(frame.height / aspect)


def _shown(frame: av.VideoFrame, aspect: Fraction) -> NDArray[np.uint8]:
    """The pixels [H, W, 3] of a frame as it is shown."""
    pixels, size = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8), _size_shown(frame, aspect)
    if size != (frame.width, frame.height):
        pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))
    return np.rot90(pixels, _quarters(frame))


def _check_amount(
    path: str | os.PathLike[str],
    frame: av.VideoFrame,
    aspect: Fraction,
    count: int,
    shape: tuple[int, ...],
    max_frame: int,
    max_pixels: int,
) -> tuple[int, int]:
    """(width, height) of a frame as it is shown. Raises OptionError where one more after `count` is too much, or
    differs in size from the first: [F, H, W, 3] in `shape`."""
    width, height = _size_shown(frame, aspect)
    if _quarters(frame) % 2:
        width, height = height, width
    if not 0 < width * height <= max_frame or max(width, height) > MAX_SIDE:
        stretched = "" if aspect == 1 else f" with its pixels of {aspect.numerator}:{aspect.denominator} made square"
        raise OptionError(
            f"{path} has frames of {width}x{height} pixels{stretched}: 1 to {max_frame} pixels can be read here, and "
            f"at most {MAX_SIDE} in each direction"
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
    """The `metadata` of `write_mp4` or `write_video`; empty for another program's file. Raises as `read_video` does."""
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
    """(width, height) of what `load_image` gives. Decodes it once, to find damage now. Raises as `load_image` does."""
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

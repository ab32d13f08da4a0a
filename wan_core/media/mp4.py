"""Writing video: H.264 in MP4 with PyAV, or a folder of PNG files where a name has no ending.

Legend: F frames, H rows, W columns; colours are red, green, blue, full range.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.container import OutputContainer
from av.video.reformatter import ColorRange, Colorspace
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from wan_core.config import OptionError
from wan_core.config.checks import meant_hint
from wan_core.config.durable import SEAL
from wan_core.config.limits import MAX_SIDE
from wan_core.config.outputs import check_place, folder_beside, written_beside, written_sealed
from wan_core.media.sound import Sound

_BT709 = 1  # the H.264 number of these primaries, this transfer and this matrix
AAC_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)
NO_FRAMES = "no frames were given: a video has at least one"


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """Settings of libx264.

    crf: quality, 0 (lossless except for colour subsampling) to 51 (worst). preset: x264's. threads: PyAV's name of what
    they share: "SLICE" encodes parts of one frame at once; "FRAME" several frames, which uses more cores and compresses
    a little better. lookahead: frames that x264 sees before it decides about one; they are encoded after the last frame
    was given. None: as the preset has it; 20 is that of x264's preset faster, half of medium's.
    """

    crf: int = 17
    preset: str = "medium"
    threads: str = "FRAME"
    lookahead: int | None = 20


@functools.cache
def _instructions() -> dict[str, str]:
    """Keep x264 from AVX-512: with it, equal frames gave different files (480x256, 5 frames: five files in 14 runs;
    with AVX2 one file in 27). Seen with x264 core 165 of PyAV 18.1 on an AMD EPYC. It can go when
    `test_equal_frames_give_equal_files` passes without it on such a processor."""
    try:
        flags = Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split()
    except OSError:  # not Linux
        return {}
    return {"x264-params": "asm=LZCNT,BMI2,FMA3,AVX2"} if "avx512f" in flags else {}


def write_mp4(
    path: str | os.PathLike[str],
    frames: Iterable[NDArray[np.uint8]],
    *,
    fps: float | Fraction,
    encoder: Encoder = Encoder(),
    sound: Sound | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write H.264 (libx264, yuv420p, BT.709) under a temporary name, which becomes `path`, ending in `.mp4`, when it is
    complete. After an error (also one of `frames`), an older file of that name is unchanged. Returns `path`.

    frames: uint8 [F, H, W, 3], or any iterable of uint8 [H, W, 3], taken one at a time. H and W even. fps: a fraction
    such as 30000 / 1001 is kept exactly. sound: stored as AAC, cut where the frames end. metadata: the settings of this
    video, stored as one JSON object in the file's `comment`: see `read_metadata`. Where it has a place for a checksum
    (`config.durable`), the file gets one.

    Raises OptionError: the path, rate, or a frame's shape or dtype is not usable, or there are no frames; OSError: the
    disk is full.
    """
    path = Path(path)
    rate = checked_rate(fps)
    check_video_name(path)
    check_place(path)
    tags = {} if metadata is None else {"comment": json.dumps(dict(metadata))}
    written = written_sealed if SEAL in (metadata or {}) else written_beside
    with written(path) as temporary:
        encode(temporary, frames, rate, encoder, tags, sound)
    return path


def check_video_name(path: Path) -> None:
    """Raise OptionError now if `write_mp4` could not write a file of this name: before hours of work, not after."""
    if path.suffix.lower() != ".mp4":
        raise OptionError(f"cannot write {path.name!r}: only MP4 is supported; give the file a name that ends in .mp4")


def checked_rate(fps: float | Fraction) -> Fraction:
    """Frames per second as they are stored. Raises OptionError."""
    if not math.isfinite(fps) or not 0.01 <= fps <= 1000:
        raise OptionError(f"fps {fps} is not allowed; use 0.01 to 1000 frames per second, such as 16")
    return Fraction(fps).limit_denominator(1001)


def encode(
    path: Path,
    frames: Iterable[NDArray[np.uint8]],
    rate: Fraction,
    encoder: Encoder,
    tags: Mapping[str, str] | None = None,
    sound: Sound | None = None,
) -> None:
    """Write H.264 into `path` itself, with the metadata `tags`. Raises as `write_mp4`, and leaves what was written."""
    size, count = None, 0
    options = {"movflags": "faststart+use_metadata_tags"}  # index at the start, for streaming; tags with any name
    codec = {"crf": str(encoder.crf), "preset": encoder.preset, **_instructions()}
    codec |= {} if encoder.lookahead is None else {"rc-lookahead": str(encoder.lookahead)}
    with av.open(str(path.absolute()), "w", format="mp4", options=options) as container:
        container.metadata.update(tags or {})
        stream = container.add_stream("libx264", rate=rate, options=codec)
        assert isinstance(stream, av.VideoStream)
        stream.codec_context.thread_type = encoder.threads
        track = None
        if sound is not None:
            sound_rate = sound.rate if sound.rate in AAC_RATES else 48000  # another rate is resampled by the track
            track = container.add_stream("aac", rate=sound_rate, layout=sound.layout)
        for frame in frames:
            array = checked_frame(np.asarray(frame), count, size)
            if size is None:
                size = array.shape[:2]
                _describe(stream, size)
            container.mux(stream.encode(_to_yuv(array, count, rate)))
            count += 1
        if size is None:
            raise OptionError(NO_FRAMES)
        container.mux(stream.encode(None))
        if sound is not None and track is not None:
            _add_sound(container, track, sound, math.ceil(sound.rate * count / rate))


def _describe(stream: av.VideoStream, size: tuple[int, ...]) -> None:
    stream.height, stream.width = size
    stream.pix_fmt = "yuv420p"
    # Stored in the file, because players otherwise guess it from the picture's size and change the colours.
    stream.codec_context.color_primaries = _BT709
    stream.codec_context.color_trc = _BT709
    stream.codec_context.colorspace = _BT709
    stream.codec_context.color_range = ColorRange.MPEG


def _add_sound(container: OutputContainer, track: av.AudioStream, sound: Sound, samples: int) -> None:
    cut = np.ascontiguousarray(sound.samples[:, :samples])
    if cut.size:
        frame = av.AudioFrame.from_ndarray(cut, format="fltp", layout=sound.layout)
        frame.sample_rate, frame.pts = sound.rate, 0
        container.mux(track.encode(frame))
    container.mux(track.encode(None))


def check_frame_sides(width: int, height: int) -> None:
    """Raise OptionError for frames that no encoder takes. Call it before they are made."""
    if max(width, height) > MAX_SIDE:
        raise OptionError(
            f"a video of {width}x{height} pixels cannot be written; at most {MAX_SIDE} in each direction can be: make "
            "it smaller"
        )


def checked_frame(array: np.ndarray, index: int, size: tuple[int, int] | None) -> NDArray[np.uint8]:
    """uint8 [H, W, 3] with even sides, and those of the frames before it. Raises OptionError."""
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise OptionError(f"frame {index} is {array.dtype} {list(array.shape)}; uint8 [height, width, 3] is needed")
    height, width = array.shape[:2]
    if size is not None and (height, width) != size:
        raise OptionError(f"frame {index} has {width}x{height} pixels, but the first has {size[1]}x{size[0]}")
    if height % 2 or width % 2 or not height or not width:
        raise OptionError(f"a video of {width}x{height} pixels cannot be written as H.264: both must be even")
    check_frame_sides(width, height)
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

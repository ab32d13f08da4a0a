"""Opens video, sound and picture files of strangers: known formats only, recognised by their first bytes, and within
limits.

FFmpeg and Pillow read many more formats. Some of them (playlists such as .m3u8, EPS) name other files or addresses, or
run programs. The limits are in `config.limits`.
"""

from __future__ import annotations

import os
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import av
from av.container import InputContainer
from av.error import FFmpegError
from PIL import Image, UnidentifiedImageError

from wan_core.config import OptionError
from wan_core.config.checks import check_file_size, check_picture_size
from wan_core.config.limits import MAX_FRAME, MAX_PICTURE_FILE, MAX_VIDEO_FILE

# -------------------------------------------------------------------------------------------------- videos and sounds

CONTAINERS = "MP4, MOV, MKV, WebM, AVI and GIF"
SOUNDS = "WAV, FLAC, MP3, M4A and OGG"
_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
MAX_STREAMS = 16
# Tags in other encodings are kept as bytes. PyAV 19 does that itself and no longer takes the argument: this can go when
# 19 is the oldest that is supported.
_TAGS: dict[str, Any] = {"metadata_errors": "surrogateescape"} if hasattr(InputContainer, "metadata_errors") else {}


def container_format(head: bytes) -> str | None:
    """FFmpeg's name of the format of a file that begins with `head` (12 bytes); None for one that is not opened."""
    if head[4:8] in _BOXES:
        return "mov"  # and MP4
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"  # and WebM
    if head.startswith(b"RIFF") and head[8:12] == b"AVI ":
        return "avi"
    return "gif" if head.startswith((b"GIF87a", b"GIF89a")) else None


def sound_format(head: bytes) -> str | None:
    """The format of a file that contains only sound, by its first bytes; None: no known one."""
    if head.startswith(b"RIFF") and head[8:12] == b"WAVE":
        return "wav"
    for start, kind in ((b"fLaC", "flac"), (b"OggS", "ogg"), (b"ID3", "mp3")):
        if head.startswith(start):
            return kind
    # A frame of MPEG audio: eleven ones, then neither a reserved version nor a reserved layer.
    mpeg = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0 and head[1] & 0x18 != 8 and head[1] & 6 != 0
    return "mp3" if mpeg else None


def open_video(path: str | os.PathLike[str]) -> AbstractContextManager[InputContainer]:
    """The container of a video file. Raises OptionError for any fault, also for those inside of the `with` block."""
    return _opened(path, "a video", container_format, f"{CONTAINERS}. Convert it to MP4.")


def open_sound(path: str | os.PathLike[str]) -> AbstractContextManager[InputContainer]:
    """Open a sound file, or a video with sound, like `open_video`."""
    readable = f"{SOUNDS}, nor a video ({CONTAINERS}). Convert it to WAV."
    return _opened(path, "sound", lambda head: sound_format(head) or container_format(head), readable)


@contextmanager
def _opened(
    path: str | os.PathLike[str], what: str, format_of: Callable[[bytes], str | None], readable: str
) -> Iterator[InputContainer]:
    try:
        check_file_size(path, MAX_VIDEO_FILE)
        with Path(path).open("rb") as file:
            kind = format_of(file.read(12))
        if kind is None:
            raise OptionError(f"cannot read {path} as {what}: it is none of {readable}")
        # Passed on to the decoders too, which FFmpeg starts while it opens the file.
        options = {"protocol_whitelist": "file", "max_streams": str(MAX_STREAMS), "max_pixels": str(MAX_FRAME)}
        address = f"file:{Path(path).absolute()}"
        with av.open(address, format=kind, options=options, **_TAGS) as container:
            yield container
    except OptionError:
        raise
    except (FFmpegError, OSError) as fault:
        raise OptionError(f"cannot read {path} as {what} ({_one_line(fault)})") from fault
    except (ValueError, ArithmeticError, LookupError, TypeError, NotImplementedError) as fault:
        # What PyAV raises for streams that it has no type for, and numbers that fit nowhere.
        raise OptionError(f"cannot read {path} as {what}: it is damaged ({_one_line(fault)})") from fault


# ----------------------------------------------------------------------------------------------------------- pictures

PICTURES = ("PNG", "JPEG", "MPO", "WEBP", "AVIF", "BMP", "DIB", "GIF", "TIFF", "PPM")
MAX_CHUNKS = 100_000
MAX_SCANNED = 600_000_000  # pixels times scans of a progressive JPEG: each scan goes over the whole picture

# What Pillow's plugins raise for damaged files. They trust the numbers of a file, so that many errors can come out.
_FAULTS = (
    OSError,
    SyntaxError,
    ValueError,
    ArithmeticError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    EOFError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


@contextmanager
def open_picture(path: str | os.PathLike[str]) -> Iterator[Image.Image]:
    """A picture whose size has been checked and whose pixels have not been decoded. Raises OptionError for any fault,
    also for those inside of the `with` block."""
    try:
        check_file_size(path, MAX_PICTURE_FILE)
        _check_chunks(Path(path))
        Image.init()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is lower
            opened = Image.open(path, formats=[name for name in PICTURES if name in Image.OPEN])
        with opened as picture:
            width, height = picture.size
            check_picture_size(width, height, str(path))
            if picture.mode == "F":
                raise OptionError(f"cannot read {path}: its pixels are fractions, and how bright 1 is is not known. "
                                  "Save it with 8 or 16 bits.")  # fmt: skip
            _check_scans(Path(path), picture)
            yield picture
    except OptionError:
        raise
    except UnidentifiedImageError as fault:
        readable = ", ".join(name for name in PICTURES if name not in ("MPO", "DIB"))
        raise OptionError(f"cannot read {path} as a picture: it is none of {readable}, or damaged") from fault
    except _FAULTS as fault:
        raise OptionError(f"cannot read {path} as a picture ({_one_line(fault)})") from fault


def _check_chunks(path: Path) -> None:
    """Raise OptionError for a PNG of very many chunks: Pillow takes microseconds for each, also for empty ones."""
    with path.open("rb") as file:
        if file.read(8) != b"\x89PNG\r\n\x1a\n":
            return
        count = 0
        while len(head := file.read(8)) == 8:
            count += 1
            if count > MAX_CHUNKS:
                raise OptionError(f"cannot read {path}: it has more than {MAX_CHUNKS} PNG chunks. Save it again.")
            file.seek(int.from_bytes(head[:4], "big") + 4, os.SEEK_CUR)


def _check_scans(path: Path, picture: Image.Image) -> None:
    """Raise OptionError for a JPEG that would be decoded over and over, scan by scan."""
    if picture.format not in ("JPEG", "MPO"):
        return
    scans, (width, height) = path.read_bytes().count(b"\xff\xda"), picture.size
    if scans * width * height > MAX_SCANNED:
        raise OptionError(
            f"cannot read {path}: {scans} scans of {width}x{height} pixels, and at most {MAX_SCANNED // 10**6} million"
            " pixels in all scans are decoded. Save it again."
        )


def _one_line(fault: BaseException) -> str:
    lines = (getattr(fault, "strerror", None) or str(fault)).strip().splitlines()
    return lines[0][:200] if lines else type(fault).__name__

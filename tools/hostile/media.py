"""Good and hostile pictures, videos and sounds."""

from __future__ import annotations

import io
import struct
import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random

import av
import numpy as np
from PIL import Image

from tools.hostile.changes import NUMBERS, damaged

# ------------------------------------------------------------------------------------------------------------- pictures


@cache
def picture(kind: str, mode: str = "RGB", **options: object) -> bytes:
    y, x = np.mgrid[:40, :56]
    pixels = np.stack([x * 4, y * 6, (x + y) * 2, 255 - x], axis=-1).astype(np.uint8)
    image = Image.fromarray(pixels).convert(mode) if mode != "I;16" else Image.fromarray(x.astype(np.uint16) * 999)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _pictures() -> list[bytes]:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "x" * 50
    pictures = [picture("PNG", mode) for mode in ("RGB", "RGBA", "P", "1", "L", "LA", "I;16")]
    pictures += [picture("JPEG"), picture("JPEG", "L", progressive=True), picture("JPEG", "CMYK")]
    with_exif = io.BytesIO()
    Image.new("RGB", (30, 20), "red").save(with_exif, "JPEG", exif=exif.tobytes())
    pictures += [with_exif.getvalue(), picture("WEBP"), picture("WEBP", "RGBA", lossless=True), picture("GIF", "P")]
    pictures += [picture("BMP"), picture("PPM"), picture("TIFF", "RGBA"), picture("TIFF", "I;16")]
    pictures += [picture("TIFF", compression=name) for name in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")]
    if "AVIF" in Image.SAVE:
        pictures.append(picture("AVIF"))
    animated = io.BytesIO()
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "green", "blue")]
    frames[0].save(animated, "GIF", save_all=True, append_images=frames[1:])
    return [*pictures, animated.getvalue()]


@cache
def pictures() -> tuple[bytes, ...]:
    Image.init()
    return tuple(_pictures())


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(width: int, height: int, colour: int = 2, depth: int = 8, more: bytes = b"", rows: int | None = None) -> bytes:
    """A PNG of zeros, however large: rows of nothing compress a thousand times. more: chunks before the pixels."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[colour]
    line = b"\0" * (1 + (width * channels * depth + 7) // 8)
    packer = zlib.compressobj(1)
    packed = b"".join(packer.compress(line) for _ in range(height if rows is None else rows)) + packer.flush()
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + more + _chunk(b"IDAT", packed) + _chunk(b"IEND", b"")


def _png_damaged_inside(random: Random) -> bytes:
    """A PNG whose chunks are sound and whose content is not: checksums do not catch it."""
    kind = random.choice(
        (b"iCCP", b"zTXt", b"iTXt", b"tEXt", b"pHYs", b"gAMA", b"tRNS", b"eXIf", b"acTL", b"fcTL", b"sRGB")
    )
    content = random.randbytes(random.choice((0, 1, 4, 30, 300)))
    content = random.choice((content, b"key\0\0" + zlib.compress(content * 50), b"II*\0\x08\0\0\0" + content))
    width, height = (random.choice((0, 1, 7, 64, 2**16, 2**31 - 1, 2**32 - 1)) for _ in range(2))
    if random.random() < 0.5:
        width = height = 16
    rows = min(height, 64) if width * height < 10**5 else 1
    return png(width, height, random.choice((0, 2, 3, 4, 6)), more=_chunk(kind, content), rows=rows)


def image(random: Random) -> bytes:
    if random.random() < 0.15:
        return _png_damaged_inside(random)
    return damaged(random, random.choice(pictures()))


def _scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    file = io.BytesIO()
    Image.new("RGB", (6000, 6000)).save(file, "JPEG", progressive=True)
    content = file.getvalue()
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * count + b"\xff\xd9"


_EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 99 99\n(x) (w) file\n%%EOF\n"
IMAGE_BOMBS: tuple[Callable[[], bytes], ...] = (
    lambda: png(7211, 7211),  # just what is allowed
    lambda: png(7211, 7211, colour=6),
    lambda: png(7211, 7211, colour=0, depth=16),
    lambda: png(13_000, 13_000, rows=9),
    lambda: png(2**31 - 1, 2**31 - 1, rows=0),
    lambda: png(2, 26_000_000),
    lambda: png(52_000_000, 1),
    lambda: png(16_383, 3_000),
    lambda: png(16, 16, more=_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(200_000_000), 1))),
    lambda: png(16, 16, more=_chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(200_000_000), 1))),
    lambda: png(16, 16, more=_chunk(b"tEXt", b"") * 99_000),
    lambda: png(16, 16, more=_chunk(b"tEXt", b"") * 5_000_000),
    lambda: _scans(2),
    lambda: _scans(500),
    lambda: b"GIF89a\xff\xff\xff\xff\xf0\0\0" + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\x08\x01\0;",
    lambda: _EPS,
    lambda: b"",
)

# --------------------------------------------------------------------------------------------------------------- videos

CODECS = {"mp4": "libx264", "mov": "mpeg4", "mkv": "libx264", "webm": "libvpx", "avi": "mpeg4", "gif": "gif"}


@cache
def video(kind: str, width: int = 32, height: int = 32, frames: int = 3, codec: str | None = None) -> bytes:
    codec = codec or CODECS[kind]
    formats = {"gif": "rgb8", "png": "rgb24", "ffv1": "yuv420p", "rawvideo": "rgb24"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{kind}"
        with av.open(str(path), "w") as out:
            out.metadata["comment"] = '{"prompt": "a red circle moving right on a blue background"}'
            stream = out.add_stream(codec, rate=8)
            stream.width, stream.height, stream.pix_fmt = width, height, formats.get(codec, "yuv420p")
            for n in range(frames):
                pixels = np.full((height, width, 3), 40 * n % 255, np.uint8)
                out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            out.mux(stream.encode(None))
        return path.read_bytes()


PLAYLISTS = (
    b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    b"ffconcat version 1.0\nfile /etc/passwd\n",
    b"[playlist]\nFile1=http://127.0.0.1:9/x\n",
    b'<?xml version="1.0"?><MPD><Period><BaseURL>file:///etc/passwd</BaseURL></Period></MPD>',
    b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 9 RTP/AVP 96\n",
)


def video_file(random: Random) -> bytes:
    if random.random() < 0.03:
        return damaged(random, random.choice(PLAYLISTS))
    kind = random.choice(tuple(CODECS))
    content = random.choice((video(kind), video(kind, 96, 96, 9))) if random.random() < 0.9 else sound("mp4")
    if random.random() < 0.25:  # a size, or another number of the header
        at = content.find(
            random.choice((b"stsd", b"tkhd", b"avc1", b"strf", b"avih", b"stts", b"stsz", b"stsc", b"elst"))
        )
        at = max(at, 0) + random.randrange(60)
        return (
            content[:at] + struct.pack(random.choice((">I", "<I")), random.choice(NUMBERS) % 2**32) + content[at + 4 :]
        )
    return damaged(random, content)


def _two_sizes() -> bytes:
    """A video whose frames differ in size: two streams of the same codec, one after the other."""
    small, large = video("gif", 16, 16), video("gif", 64, 64)
    return small[:-1] + large[13:]


VIDEO_BOMBS: tuple[Callable[[], bytes], ...] = (
    *(lambda content=content: content for content in PLAYLISTS),
    lambda: video("mov", 4096, 2304, 21, "png"),  # just what is allowed
    lambda: video("mov", 4096, 2304, 30, "png"),
    lambda: video("avi", 8192, 8192, 1, "png"),
    lambda: video("mov", 512, 512, 16, "png"),  # the largest that `check` compares
    lambda: video("avi", 16, 16, 11_000, "mpeg4"),
    lambda: video("mp4", 2, 2, 5, "mpeg4"),
    lambda: video("gif", 65_000, 600, 1),
    lambda: b"GIF89a\xff\xff\xff\xff\xf0\0\0" + bytes(6) + b",\0\0\0\0\xff\xff\xff\xff\0\x08\x01\0;",
    _two_sizes,
    lambda: sound("mp4"),
    lambda: b"",
)

# --------------------------------------------------------------------------------------------------------------- sounds

SOUNDS = {"wav": "pcm_s16le", "flac": "flac", "mp3": "libmp3lame", "mp4": "aac", "ogg": "flac"}


@cache
def sound(kind: str, seconds: int = 1, rate: int = 16000) -> bytes:
    """Silence, which compresses a thousand times."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as out:
        stream = out.add_stream(SOUNDS[kind], rate=rate, layout="mono")
        for second in range(seconds):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, rate), np.int16), format="s16", layout="mono")
            frame.sample_rate, frame.pts = rate, second * rate
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


def sound_file(random: Random) -> bytes:
    if random.random() < 0.03:
        return damaged(random, random.choice(PLAYLISTS))
    return damaged(random, sound(random.choice(tuple(SOUNDS)), random.choice((1, 3))))


def _wav(rate: int, channels: int, samples: int) -> bytes:
    """A head that says so, and a second of silence."""
    form = struct.pack("<HHIIHH", 1, channels % 2**16, rate, rate * 2 % 2**32, channels * 2 % 2**16, 16)
    data = b"data" + struct.pack("<I", samples * 2 % 2**32) + bytes(32000)
    return b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVEfmt " + struct.pack("<I", 16) + form + data


SOUND_BOMBS: tuple[Callable[[], bytes], ...] = (
    *(lambda content=content: content for content in PLAYLISTS),
    lambda: sound("flac", 1300, 48000),  # just what is allowed
    lambda: sound("flac", 1400, 48000),
    lambda: sound("mp3", 2000, 32000),
    lambda: _wav(0, 1, 16000),
    lambda: _wav(2**32 - 1, 1, 16000),
    lambda: _wav(16000, 2**16 - 1, 16000),
    lambda: _wav(1, 2, 2**31 - 1),
    lambda: video("avi"),
    lambda: b"ID3" + b"\xff" * 30,
    lambda: b"",
)

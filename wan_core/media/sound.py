"""Sound in memory, and reading it from sound files and videos with PyAV.

Legend: c channels, N samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import av
import numpy as np
from numpy.typing import NDArray

from wan_core.config import OptionError
from wan_core.config.limits import MAX_SOUND
from wan_core.media.opening import open_sound

GROWTH = 2**20  # samples for which room is made at once while a sound is read
RATES = (8000, 96000)  # the least and the most samples per second that AAC takes


@dataclass(frozen=True)
class Sound:
    """float32 [c, N] in -1..1, one or two channels, and samples per second. Raises OptionError."""

    samples: NDArray[np.float32]
    rate: int

    def __post_init__(self) -> None:
        if self.samples.ndim != 2 or self.samples.shape[0] not in (1, 2) or self.samples.dtype != np.float32:
            raise OptionError(
                f"the audio is {self.samples.dtype} {list(self.samples.shape)}; float32 [channels, samples] with one "
                f"or two channels is needed"
            )
        if not RATES[0] <= self.rate <= RATES[1]:
            raise OptionError(f"audio of {self.rate} samples per second cannot be written; use 8000 to 96000")

    @property
    def seconds(self) -> float:
        return self.samples.shape[1] / self.rate

    @property
    def layout(self) -> str:
        """PyAV's name of it."""
        return "mono" if self.samples.shape[0] == 1 else "stereo"


def read_sound(path: str | os.PathLike[str]) -> Sound:
    """The first sound of a WAV, FLAC, MP3, M4A or OGG file or of a video, from its first sample on. More than two
    channels become two, rates that AAC does not take 48,000.

    Raises OptionError if the file is missing, has no sound, is damaged or too long.
    """
    try:
        status = os.stat(path)
    except OSError as fault:
        raise OptionError(f"cannot read {path} ({fault.strerror})") from fault
    return _read(os.fspath(path), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=2)
def _read(path: str, size: int, changed: int) -> Sound:
    with open_sound(path) as container:
        if not container.streams.audio:
            raise OptionError(f"{path} holds no sound")
        codec = container.streams.audio[0].codec_context
        if codec is None:
            raise OptionError(f"cannot read {path} as sound: it is stored in a way that is not known here")
        rate = codec.sample_rate if RATES[0] <= codec.sample_rate <= RATES[1] else 48000
        samples = _resampled(container.decode(audio=0), 1 if codec.channels == 1 else 2, rate, path)
    if not samples.shape[1]:
        raise OptionError(f"cannot read {path} as sound (it holds no samples)")
    if not np.isfinite(samples).all():
        raise OptionError(f"cannot read {path} as sound: some of its samples are not numbers")
    return Sound(samples, rate)


def mono(sound: Sound, rate: int) -> NDArray[np.float32]:
    """[N] at so many samples per second: the mean of all channels."""
    if sound.rate == rate:
        return sound.samples.mean(0, dtype=np.float32)
    return _resampled(_seconds(sound), 1, rate, "the sound")[0]


def _seconds(sound: Sound) -> Iterator[av.AudioFrame]:
    """The mean of all channels, a second at a time."""
    for first in range(0, sound.samples.shape[1], sound.rate):
        part = sound.samples[:, first : first + sound.rate].mean(0, keepdims=True, dtype=np.float32)
        frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="mono")
        frame.sample_rate = sound.rate
        yield frame


def _resampled(frames: Iterable[av.AudioFrame], channels: int, rate: int, path: str) -> NDArray[np.float32]:
    """float32 [c, N]. Raises OptionError for more than `MAX_SOUND` samples."""
    resampler = av.AudioResampler(format="fltp", layout="mono" if channels == 1 else "stereo", rate=rate)
    samples, count = np.empty((0, channels), np.float32), 0

    def pieces() -> Iterator[av.AudioFrame]:
        for frame in frames:
            frame.pts = None  # gaps in a file's times are none in its samples
            yield from resampler.resample(frame)
        yield from resampler.resample(None)

    for piece in pieces():
        if (count + piece.samples) * channels > MAX_SOUND:
            raise OptionError(f"{path} has more than {MAX_SOUND} samples of sound: cut it first")
        if count + piece.samples > len(samples):  # grows in place, so that memory holds each sample once
            samples.resize((count + piece.samples + GROWTH, channels), refcheck=False)
        samples[count : count + piece.samples] = piece.to_ndarray().T
        count += piece.samples
    samples.resize((count, channels), refcheck=False)
    return np.ascontiguousarray(samples.T)

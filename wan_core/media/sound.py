"""Sound in memory, and reading it from sound files and videos with PyAV.

Legend: c channels, N samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import av
import numpy as np
from av.container import InputContainer
from av.stream import Disposition
from numpy.typing import NDArray

from wan_core.config import OptionError
from wan_core.config.changes import until_changed
from wan_core.config.limits import MAX_SOUND
from wan_core.media.opening import open_sound

GROWTH = 2**20  # samples for which room is made at once while a sound is read
COVER = Disposition.attached_pic  # a picture that is a stream beside the sound
GAP = 0.1  # seconds without samples, inside of a sound, from which on they are silence, and not inexact times
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
        if not np.isfinite(self.samples).all():
            raise OptionError("the audio holds numbers that are not finite: another node made them, or leave it out")
        if not RATES[0] <= self.rate <= RATES[1]:
            raise OptionError(f"audio of {self.rate} samples per second cannot be written; use 8000 to 96000")

    @property
    def seconds(self) -> float:
        return self.samples.shape[1] / self.rate

    @property
    def layout(self) -> str:
        return "mono" if self.samples.shape[0] == 1 else "stereo"


@until_changed(2)
def read_sound(path: str | os.PathLike[str]) -> Sound:
    """The first sound of a WAV, FLAC, MP3, M4A or OGG file or of a video, from the beginning of that video on: before
    it begins, and in its gaps, is silence. More than two channels become two, rates that AAC does not take 48,000.

    Raises OptionError if the file is missing, has no sound, is damaged or too long.
    """
    with open_sound(path) as container:
        if not container.streams.audio:
            raise OptionError(f"{path} holds no sound")
        codec = container.streams.audio[0].codec_context
        if codec is None:
            raise OptionError(f"cannot read {path} as sound: it is stored in a way that is not known here")
        rate = codec.sample_rate if RATES[0] <= codec.sample_rate <= RATES[1] else 48000
        channels = 1 if codec.channels == 1 else 2
        samples = _resampled(container.decode(audio=0), channels, rate, path, _beginning(container))
    if not samples.shape[1]:
        raise OptionError(f"cannot read {path} as sound (it holds no samples)")
    if not np.isfinite(samples).all():
        raise OptionError(f"cannot read {path} as sound: some of its samples are not numbers")
    return Sound(samples, rate)


def _beginning(container: InputContainer) -> float | None:
    """The time in seconds at which a video begins; None for a file without one."""
    times = [
        float(one.start_time * one.time_base)
        for one in (*container.streams.video, *container.streams.audio)
        if one.start_time is not None and one.time_base is not None and not one.disposition & COVER
    ]
    videos = [one for one in container.streams.video if not one.disposition & COVER]
    return min(times) if videos and times else None


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


def _resampled(
    frames: Iterable[av.AudioFrame],
    channels: int,
    rate: int,
    path: str | os.PathLike[str],
    beginning: float | None = None,
) -> NDArray[np.float32]:
    """float32 [c, N], from the time `beginning` in seconds on; None: from the first sample on. Raises OptionError for
    more than `MAX_SOUND` samples."""
    resampler = av.AudioResampler(format="fltp", layout="mono" if channels == 1 else "stereo", rate=rate)
    samples, count, begin = np.empty((0, channels), np.float32), 0, beginning

    def missing(frame: av.AudioFrame) -> int:
        """How many samples are missing before a frame, by its time."""
        nonlocal begin
        begin = frame.time if begin is None else begin
        silent = 0.0 if frame.time is None or begin is None else frame.time - begin - count / rate
        return round(min(silent * rate, MAX_SOUND + 1)) if silent > (GAP if count else 0) else 0

    def pieces() -> Iterator[NDArray[np.float32]]:
        for frame in frames:
            if silent := missing(frame):
                yield np.zeros((silent, channels), np.float32)
            frame.pts = None  # the resampler takes samples as they come
            yield from (piece.to_ndarray().T for piece in resampler.resample(frame))
        yield from (piece.to_ndarray().T for piece in resampler.resample(None))

    for piece in pieces():
        if (count + len(piece)) * channels > MAX_SOUND:
            raise OptionError(f"{path} has more than {MAX_SOUND} samples of sound: cut it first")
        if count + len(piece) > len(samples):  # grows in place, so that memory holds each sample once
            samples.resize((count + len(piece) + GROWTH, channels), refcheck=False)
        samples[count : count + len(piece)] = piece
        count += len(piece)
    samples.resize((count, channels), refcheck=False)
    return np.ascontiguousarray(samples.T)

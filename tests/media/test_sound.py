"""Sound is read from every kind of file, and what cannot be read is refused in words."""

from __future__ import annotations

import wave
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from wan_core.config import OptionError
from wan_core.media import sound as sound_module
from wan_core.media.mp4 import write_mp4
from wan_core.media.sound import Sound, read_sound

RATE = 22050
CODECS = {"wav": "pcm_s16le", "flac": "flac", "mp3": "libmp3lame", "m4a": "aac", "ogg": "flac"}


def tone(seconds: float = 1.0, rate: int = RATE, channels: int = 2) -> np.ndarray:
    """440 Hz on the left, 660 Hz on the right."""
    time = np.arange(int(seconds * rate)) / rate
    return np.stack([0.5 * np.sin(2 * np.pi * pitch * time) for pitch in (440, 660)[:channels]]).astype(np.float32)


def written(path: Path, samples: np.ndarray, rate: int = RATE) -> Path:
    kind = path.suffix[1:]
    layout = "mono" if len(samples) == 1 else "stereo"
    with av.open(str(path), "w", format="mp4" if kind == "m4a" else kind) as container:
        track = container.add_stream(CODECS[kind], rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        container.mux(track.encode(frame))
        container.mux(track.encode(None))
    return path


def pitch_of(samples: np.ndarray, rate: int) -> float:
    power = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(power.argmax() * rate / len(samples))


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("channels", [1, 2])
def test_every_kind_of_file_gives_its_sound(tmp_path: Path, kind: str, channels: int) -> None:
    sound = read_sound(written(tmp_path / f"tone.{kind}", tone(channels=channels)))
    assert (sound.rate, len(sound.samples)) == (RATE, channels)
    assert abs(sound.seconds - 1) < 0.12  # MP3 and AAC store whole frames
    for row, pitch in zip(sound.samples, (440, 660), strict=False):
        assert abs(pitch_of(row, RATE) - pitch) < 3
    if kind in ("wav", "flac"):
        assert np.abs(sound.samples - tone(channels=channels)).max() < 1e-4


def test_the_sound_of_a_video_is_read(tmp_path: Path) -> None:
    frames = np.zeros((16, 32, 32, 3), np.uint8)
    write_mp4(tmp_path / "video.mp4", frames, fps=16, sound=Sound(tone(), RATE))
    sound = read_sound(tmp_path / "video.mp4")
    assert abs(sound.seconds - 1) < 0.12 and abs(pitch_of(sound.samples[1], RATE) - 660) < 3


@pytest.mark.parametrize(
    ("kind", "video", "audio"),
    [("mp4", "libx264", "aac"), ("mkv", "libx264", "aac"), ("webm", "libvpx-vp9", "libopus")],
)
@pytest.mark.parametrize("begin", [0, 0.3, 1.0])
@pytest.mark.parametrize("rest", [0, 1])
def test_a_sound_is_heard_when_its_video_has_it(
    tmp_path: Path, kind: str, video: str, audio: str, begin: float, rest: int
) -> None:
    """A tone of a second that begins later than the video, with a rest in its middle."""
    path, rate, samples = tmp_path / f"late.{kind}", 48000, tone(1.0, 48000, 1)
    with av.open(str(path), "w") as container:
        pictures, track = container.add_stream(video, rate=25), container.add_stream(audio, rate=rate, layout="mono")
        pictures.width = pictures.height = 32
        pictures.pix_fmt = "yuv420p"
        for _ in range(50):
            container.mux(pictures.encode(av.VideoFrame(32, 32, "yuv420p")))
        container.mux(pictures.encode(None))
        for first in range(0, rate, 960):
            frame = av.AudioFrame.from_ndarray(samples[:, first : first + 960], format="fltp", layout="mono")
            frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
            frame.pts = first + round(begin * rate) + (rest * rate if first >= rate // 2 else 0)
            container.mux(track.encode(frame))
        container.mux(track.encode(None))
    heard = read_sound(path)
    loud = np.flatnonzero(np.abs(heard.samples[0]) > 0.1) / heard.rate
    assert abs(loud[0] - begin) < 0.005 and abs(heard.seconds - begin - rest - 1) < 0.03
    assert abs(np.diff(loud).max() - rest) < 0.02


def test_what_is_no_sound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.wav").write_text("these are words, and no sound")
    write_mp4(tmp_path / "silent.mp4", np.zeros((2, 32, 32, 3), np.uint8), fps=16)
    with wave.open(str(tmp_path / "empty.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
    whole = written(tmp_path / "tone.flac", tone()).read_bytes()
    (tmp_path / "cut.flac").write_bytes(whole[:30])
    for name, message in (
        ("none.wav", "No such file"),
        ("text.wav", "it is none of WAV, FLAC, MP3, M4A and OGG, nor a video"),
        ("silent.mp4", "holds no sound"),
        ("empty.wav", "holds no samples"),
        ("cut.flac", "cannot read"),
    ):
        with pytest.raises(OptionError, match=message):
            read_sound(tmp_path / name)
    monkeypatch.setattr(sound_module, "MAX_SOUND", 1000)
    with pytest.raises(OptionError, match="more than 1000 samples"):
        read_sound(written(tmp_path / "long.wav", tone()))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_not_finite(number: float) -> None:
    with pytest.raises(OptionError, match="not finite"):
        Sound(np.array([[0.0, number]], np.float32), RATE)

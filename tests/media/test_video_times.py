"""Videos are read by the times of their frames, and with square pixels, whatever the container."""

from __future__ import annotations

from bisect import bisect
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from wan_core.config import OptionError, Request
from wan_core.media import video as reading
from wan_core.media.video import read_frames, read_video, video_facts
from wan_core.models.wan.families.animate import ANIMATE
from wan_core.models.wan.families.media import read_fitted
from wan_core.pipeline.encode import load_video

CODECS = {"mp4": "libx264", "mkv": "libx264", "webm": "libvpx-vp9", "avi": "mpeg4"}
FINE = 100  # places in a second at which frames of these files begin


def grey_frame(number: int, size: tuple[int, int] = (32, 32)) -> np.ndarray:
    """A frame that says its number by its grey."""
    return np.full((size[1], size[0], 3), 8 * number % 256, np.uint8)


def number_of(frame: np.ndarray) -> int:
    return round(float(frame.mean()) / 8)


def written(path: Path, begins: list[int], rate: int = FINE, aspect: Fraction = Fraction(1)) -> Path:
    """A video whose frames begin at these places of `rate` in a second."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(CODECS[path.suffix[1:]], rate=rate)
        stream.width = stream.height = 32
        stream.pix_fmt, stream.codec_context.sample_aspect_ratio = "yuv420p", aspect
        if stream.codec_context.name == "libx264":
            stream.options = {"bf": "0", "crf": "5"}  # with B-frames MP4 stores durations of the order of decoding
        for number, begin in enumerate(begins):
            frame = av.VideoFrame.from_ndarray(grey_frame(number), format="rgb24")
            frame.pts, frame.time_base = begin, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def gif(path: Path, lengths: list[int]) -> Path:
    """lengths: hundredths of a second of each frame."""
    pictures = [Image.fromarray(grey_frame(number)) for number in range(len(lengths))]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=[10 * one for one in lengths], loop=0)
    return path


@pytest.mark.parametrize("kind", CODECS)
@pytest.mark.parametrize("rate", [8, 24, 25, 30, 60])
def test_a_regular_video_gives_the_nearest_frames(tmp_path: Path, kind: str, rate: int) -> None:
    facts = video_facts(written(tmp_path / f"regular.{kind}", list(range(31)), rate))
    assert (facts.frames, facts.starts) == (31, None) and abs(facts.fps - rate) < 0.01
    for fps in (8, 16, 24, 30):
        expected = np.round(np.arange(31 * fps // rate) / fps * rate).clip(0, 30)
        assert abs(len(facts.frames_at(fps)) - len(expected)) <= 1
        assert np.array_equal(facts.frames_at(fps)[: len(expected)], expected[: len(facts.frames_at(fps))])
    assert np.array_equal(facts.frames_at(facts.fps), range(31))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from([*CODECS, "gif"]), fps=st.sampled_from([8, 16, 24]))
def test_what_is_shown_at_a_time_is_read_for_it(tmp_path: Path, data: st.DataObject, kind: str, fps: int) -> None:
    """Frames of any lengths, rests of seconds among them: each moment of the video has its frame, at most
    half a frame of either early."""
    lengths = data.draw(st.lists(st.sampled_from([2, 3, 4, 10, 57, 200]), min_size=3, max_size=9))
    begins, path = [0, *accumulate(lengths[:-1])], tmp_path / f"uneven.{kind}"
    facts = video_facts(gif(path, lengths) if kind == "gif" else written(path, begins))
    chosen = facts.frames_at(fps)
    if kind == "gif":
        assert abs(len(chosen) - sum(lengths) * fps / FINE) <= 1
    for place, number in enumerate(chosen):
        moment = place / fps * FINE
        earliest, latest = (bisect(begins, moment + margin) - 1 for margin in (-1, 0.5 * FINE / fps + 1))
        assert earliest <= number <= latest
    assert len(chosen) > begins[-1] / FINE * fps - 1
    assert [number_of(frame) for frame in read_frames(path, chosen)] == chosen.tolist()


def test_a_screen_recording_with_a_rest_keeps_its_speed(tmp_path: Path) -> None:
    """30 frames a second, two seconds without one, 30 a second again; MP4 with B-frames."""
    path = tmp_path / "screen.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for number, begin in enumerate([*range(15), *range(75, 90)]):
            frame = av.VideoFrame.from_ndarray(grey_frame(number), format="rgb24")
            frame.pts, frame.time_base = begin, Fraction(1, 30)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    facts = video_facts(path)
    assert abs(facts.seconds - 3) < 0.01 and abs(facts.fps - 30) < 0.1
    chosen = facts.frames_at(10)
    assert [*chosen] == [0, 3, 6, 9, 12, *[14] * 20, 15, 18, 21, 24, 27]


def test_a_video_to_start_from_keeps_its_speed(tmp_path: Path) -> None:
    """60 frames a second into 8: a frame of 17 shows what the source shows at its time."""
    path = written(tmp_path / "fast.mp4", list(range(31)), 60)
    frames = load_video(str(path), (32, 32), 4, 8)
    assert [number_of(255 * frame.numpy()) for frame in frames] == [0, 8, 15, 22]
    with pytest.raises(OptionError, match="has 4 frames at 8 frames per second, and 5 are asked for"):
        load_video(str(path), (32, 32), 5, 8)


@pytest.mark.parametrize(
    ("begins", "asked", "fps", "chosen"),
    [
        (range(6), None, 30, [0, 1, 2, 3, 4, 5]),
        (range(6), 15, 15, [0, 2, 4]),
        ([0, 1, 2, 12, 13], None, 30, [0, 1, *[2] * 10, 3, 4]),
    ],
    ids=["all frames", "half as many", "a rest"],
)
def test_a_pose_video_of_animate_keeps_its_speed(
    tmp_path: Path, begins: list[int], asked: int | None, fps: int, chosen: list[int]
) -> None:
    """At its own rate, or at the one that is asked for."""
    path = str(written(tmp_path / "pose.mp4", list(begins), 30))
    request = Request(prompt="", reference="r", pose_video=path, fps=asked)
    assert ANIMATE.whole_length(request, ANIMATE.tasks[0]) == (fps, len(chosen))
    frames = read_fitted(path, ANIMATE.read_rate(path, fps), 99, (32, 32), lambda frame: frame)
    assert [number_of(frame) for frame in frames] == chosen


def test_only_the_beginning_is_decoded_where_that_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "long.mp4", list(range(100)), 25)
    monkeypatch.setattr(reading, "MAX_FRAMES", 60)
    facts = video_facts(path, 1.0)
    assert 26 <= facts.frames < 60 and len(facts.frames_at(8)) >= 8
    with pytest.raises(OptionError, match="more than 60 frames"):
        video_facts(path)


@pytest.mark.parametrize("kind", ["mp4", "mkv"])
@pytest.mark.parametrize(("aspect", "size"), [("2", (64, 32)), ("1/2", (32, 64)), ("16/15", (34, 32)), ("1", (32, 32))])
def test_pixels_become_square(tmp_path: Path, kind: str, aspect: str, size: tuple[int, int]) -> None:
    path = written(tmp_path / f"wide.{kind}", [0, 1, 2], 25, Fraction(aspect))
    video = read_video(path)
    assert video.shape == (3, size[1], size[0], 3) and video_facts(path)[:2] == size
    assert [number_of(frame) for frame in video] == [0, 1, 2]
    assert np.array_equal(np.stack(list(read_frames(path, np.arange(3)))), video)

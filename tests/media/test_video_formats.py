"""Every format of a video: frames, times and settings come back."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from wan_core.config import OptionError
from wan_core.config.outputs import Outputs
from wan_core.media.mp4 import FRAME_NAME, is_folder, write_video
from wan_core.media.video import read_metadata, read_video

FIRST = FRAME_NAME.format(1)


def clip(frames: int = 6) -> np.ndarray:
    """uint8 [F, 32, 48, 3]: a bar that moves over a colour gradient."""
    video = np.empty((frames, 32, 48, 3), np.uint8)
    video[..., 0], video[..., 1] = np.linspace(0, 255, 48).astype(np.uint8), 80
    video[..., 2] = 120
    for index in range(frames):
        video[index, :, 6 * index : 6 * index + 4] = (250, 240, 30)
    return video


def test_a_file(tmp_path: Path) -> None:
    video, path = clip(), tmp_path / "x.MP4"
    assert write_video(path, iter(video), fps=8, metadata={"seed": "3"}) == path
    back = read_video(path)
    assert back.shape == video.shape and np.abs(back.astype(int) - video).mean() < 6
    assert read_metadata(path) == {"seed": "3"}
    with av.open(str(path)) as container:
        assert container.streams.video[0].average_rate == 8
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.MP4"]


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    video, path = clip(), tmp_path / "frames"
    assert is_folder(path)
    write_video(path, iter(video), fps=Fraction(24000, 1001), metadata={"seed": "3"})
    assert sorted(entry.name for entry in path.iterdir()) == [FRAME_NAME.format(n) for n in range(1, 7)]
    for index, name in enumerate(sorted(path.iterdir())):
        with Image.open(name) as picture:
            assert np.array_equal(np.asarray(picture), video[index])  # without loss
    with Image.open(path / FIRST) as picture:
        assert json.loads(picture.info["comment"]) == {"seed": "3", "fps": "24000/1001"}
    write_video(path, iter(video[:2]), fps=8)  # a shorter one leaves no frames of the longer one
    assert len(list(path.iterdir())) == 2 and len(list(tmp_path.iterdir())) == 1


def test_a_folder_with_other_files_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "frames"
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match="not a folder of pictures"):
        write_video(path, clip(), fps=8)
    with pytest.raises(OptionError, match="not a folder of pictures"):
        Outputs({}, overwrite=True).add("--out", path, pictures=True)
    with Outputs({}) as outputs:
        assert outputs.add("--out", path, pictures=True) == tmp_path / "frames-1"
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["x.mp4", "x"])
def test_what_was_there_stays_after_an_error(name: str, tmp_path: Path) -> None:
    path = write_video(tmp_path / name, clip(), fps=8)

    def contents() -> list[tuple[str, bytes]]:
        return sorted((one.name, one.read_bytes()) for one in tmp_path.rglob("*") if one.is_file())

    before = contents()

    def broken():
        for _ in range(20):  # more than an encoder holds back
            yield from clip(3)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_video(path, broken(), fps=8)
    with pytest.raises(OptionError, match="no frames"):
        write_video(path, iter(()), fps=8)
    assert contents() == before

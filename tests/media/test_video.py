"""Video files come back as they were written, and a failed write changes nothing on disk."""

from __future__ import annotations

import os
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from wan_core.config import OptionError
from wan_core.media.mp4 import Encoder, write_mp4
from wan_core.media.sound import Sound
from wan_core.media.video import load_image, read_metadata, read_video, video_facts
from wan_lab.shapes import PALETTE


def gradient(frames: int, height: int, width: int) -> np.ndarray:
    """A smooth picture that moves: uint8 [F, H, W, 3]."""
    f, y, x = np.mgrid[:frames, :height, :width]
    waves = [np.sin(x / 25 + f / 4), np.cos(y / 20 - f / 5), np.sin((x + y) / 30)]
    return (127.5 + 110 * np.stack(waves, axis=-1)).astype(np.uint8)


def stripes(frames: int) -> np.ndarray:
    """The saturated colours of the embedded model, in stripes of 16 pixels."""
    row = np.repeat(np.array(list(PALETTE.values()), dtype=np.uint8), 16, axis=0)
    return np.broadcast_to(row, (frames, 32, *row.shape)).copy()


def files(folder) -> list[str]:
    return sorted(os.listdir(folder))


# a file per example, overwritten by the next: that a fixture is shared is no harm here
shared_folder = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(shared_folder, max_examples=10)
@given(
    frames=st.integers(1, 12),
    height=st.integers(8, 40).map(lambda n: 2 * n),
    width=st.integers(8, 40).map(lambda n: 2 * n),
    fps=st.sampled_from([8, 16, 24, 23.976, Fraction(30000, 1001), 0.5]),
)
def test_frames_size_and_rate_survive(tmp_path, frames, height, width, fps):
    video = gradient(frames, height, width)
    path = write_mp4(tmp_path / "clip.mp4", iter(video), fps=fps)
    back = read_video(path)
    assert back.dtype == np.uint8 and back.shape == video.shape
    assert np.abs(back.astype(int) - video).mean() < 3
    with av.open(str(path)) as container:
        rate = container.streams.video[0].average_rate
    assert rate is not None and abs(rate - fps) < 1e-3 * fps
    assert files(tmp_path) == ["clip.mp4"]


def test_colours_survive(tmp_path):
    """Within rounding: the file says that it is BT.709, and the decoder believes it."""
    video = stripes(3)
    back = read_video(write_mp4(tmp_path / "stripes.mp4", video, fps=8)).astype(int)
    assert np.abs(back - video)[:, :, 8::16].max() <= 3
    with av.open(str(tmp_path / "stripes.mp4")) as container:
        codec = container.streams.video[0].codec_context
        assert (codec.name, codec.pix_fmt, codec.colorspace, codec.color_range) == ("h264", "yuv420p", 1, 1)


@pytest.mark.parametrize(
    ("matrix", "quarters"),
    [((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)],
    ids=["right", "half", "left"],
)
def test_a_video_of_a_phone_is_turned_as_it_says(tmp_path, matrix, quarters):
    path = write_mp4(tmp_path / "phone.mp4", gradient(3, 32, 64), fps=8)
    plain, stored = read_video(path), bytearray(path.read_bytes())
    place = stored.index(b"tkhd") + 44
    a, b, c, d = (number << 16 for number in matrix)
    stored[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(stored)
    turned = np.rot90(plain, quarters, axes=(1, 2))
    assert np.array_equal(read_video(path), turned)
    assert video_facts(path)[:3] == (turned.shape[2], turned.shape[1], 3)


@settings(shared_folder, max_examples=15)
@given(
    metadata=st.dictionaries(
        st.text(max_size=20), st.text(alphabet=st.characters(exclude_categories=()), max_size=60), max_size=4
    )
)
def test_metadata_survives(tmp_path, metadata):
    path = write_mp4(tmp_path / "clip.mp4", gradient(1, 16, 16), fps=8, metadata=metadata)
    assert read_metadata(path) == metadata


# ------------------------------------------------------------------------------------------------------- failed writes


@pytest.mark.skipif(os.name == "nt", reason="Windows refuses to replace an open file")
def test_a_reader_of_the_older_file_is_not_disturbed(tmp_path):
    """The new file takes the older one's name in one step; the older one's bytes are never written to."""
    path = write_mp4(tmp_path / "clip.mp4", gradient(3, 32, 32), fps=8)
    before = path.read_bytes()
    with path.open("rb") as reader:
        write_mp4(path, gradient(9, 32, 32), fps=8)
        assert reader.read() == before != path.read_bytes()


FINE = gradient(2, 16, 16)
REFUSED = {
    "odd height": ({"frames": gradient(2, 15, 16)}, "16x15 pixels.*must be even"),
    "odd width": ({"frames": gradient(2, 16, 17)}, "17x16 pixels.*must be even"),
    "empty picture": ({"frames": FINE[:, :0]}, "must be even"),
    "floats": ({"frames": FINE / 255}, r"frame 0 is float64 .*uint8"),
    "four channels": ({"frames": np.concatenate([FINE, FINE[..., :1]], -1)}, r"\[16, 16, 4\]"),
    "one picture": ({"frames": FINE[0]}, r"frame 0 is uint8 \[16, 3\]"),
    "growing": ({"frames": [FINE[0], gradient(1, 18, 16)[0]]}, "frame 1 has 16x18 pixels, but the first has 16x16"),
    "no frames": ({"frames": FINE[:0]}, "no frames"),
    "no fps": ({"fps": 0}, "fps 0 is not allowed"),
    "not a rate": ({"fps": float("nan")}, "fps nan is not allowed"),
    "format": ({"path": "clip.webm"}, "only MP4"),
    "no extension": ({"path": "clip"}, "only MP4"),
    "no folder": ({"path": "missing/clip.mp4"}, "No such file or directory.*Create the folder"),
    "file as folder": ({"path": "file/clip.mp4"}, "into the folder .*file"),
    "folder as file": ({"path": "folder.mp4"}, "a folder has that name"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_why_and_leave_nothing(tmp_path, case):
    changes, message = REFUSED[case]
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.mp4").mkdir()
    arguments = {"path": "clip.mp4", "frames": FINE, "fps": 8, **changes}
    with pytest.raises(OptionError, match=message):
        write_mp4(tmp_path / arguments["path"], arguments["frames"], fps=arguments["fps"])
    assert files(tmp_path) == ["file", "folder.mp4"] and not files(tmp_path / "folder.mp4")


@pytest.mark.parametrize("threads", ["SLICE", "FRAME"])
@pytest.mark.parametrize("channels", [1, 2])
def test_sound_ends_with_the_frames(tmp_path, channels, threads):
    """A second of frames, three seconds of a tone: one second of it is stored, and sounds as it did."""
    tone = np.sin(np.arange(3 * 16000) * 2 * np.pi * 440 / 16000).astype(np.float32) * 0.5
    sound = Sound(np.stack([tone] * channels), 16000)
    encoder = Encoder(threads=threads)
    path = write_mp4(tmp_path / "clip.mp4", gradient(8, 32, 32), fps=8, sound=sound, encoder=encoder)
    assert len(read_video(path)) == 8
    with av.open(str(path)) as container:
        assert container.streams.audio[0].channels == channels
        heard = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
    assert heard.shape[0] == channels and 16000 <= heard.shape[1] < 16000 + 2 * 1024
    peak = np.abs(np.fft.rfft(heard[0, 2000:10000])).argmax() * 2
    assert abs(peak - 440) <= 4


@pytest.mark.parametrize(("lookahead", "said"), [({}, b"rc_lookahead=20"), ({"lookahead": None}, b"rc_lookahead=40")])
def test_x264_gets_the_settings(tmp_path, lookahead, said):
    """The file has the settings in x264's own words."""
    encoder = Encoder(crf=23, **lookahead)
    written = write_mp4(tmp_path / "clip.mp4", gradient(2, 32, 32), fps=8, encoder=encoder).read_bytes()
    assert said in written and b"crf=23.0" in written


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OptionError, match="Permission denied"):
        write_mp4(tmp_path / "clip.mp4", FINE, fps=8)


@pytest.mark.parametrize("read", [read_video, read_metadata, load_image])
@pytest.mark.parametrize("content", [None, b"", b"not a picture" * 99], ids=["missing", "empty", "text"])
def test_unreadable_files_are_named(tmp_path, read, content):
    path = tmp_path / "input.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(OptionError, match=r"cannot read .*input\.bin as a (video|picture)"):
        read(path)


# -------------------------------------------------------------------------------------------------------------- images


def test_orientation_is_applied(tmp_path):
    """Orientation 6: the camera was held on its side, rows are to be read as columns."""
    picture = gradient(1, 20, 30)[0]
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(picture).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal((load_image(tmp_path / "a.png") * 255).round(), np.rot90(picture, -1))


def test_transparency_becomes_black(tmp_path):
    picture = np.full((4, 6, 4), 255, dtype=np.uint8)
    picture[:, :2, 3] = 0
    picture[:, 2:4, 3] = 51
    Image.fromarray(picture).save(tmp_path / "a.png")
    np.testing.assert_allclose(load_image(tmp_path / "a.png")[0, :, 0], [0, 0, 0.2, 0.2, 1, 1], atol=1e-6)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "1", "CMYK", "I;16"])
def test_every_mode_is_read(tmp_path, mode):
    grey = np.repeat(np.linspace(0, 255, 16).astype(np.uint8)[None], 8, axis=0)
    if mode == "I;16":
        Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "a.tiff")
    else:
        Image.fromarray(grey).convert(mode).save(tmp_path / "a.tiff")
    loaded = load_image(tmp_path / "a.tiff")
    assert loaded.shape == (8, 16, 3)
    error = np.abs(loaded[..., 0] - grey / 255)
    assert error.max() < 0.02 or (mode == "1" and np.array_equal(loaded, loaded.round()))


def test_a_picture_of_fractions_is_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 6), 0.5, np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(OptionError, match="fractions"):
        load_image(tmp_path / "a.tiff")


@settings(shared_folder, max_examples=15)
@given(size=st.tuples(st.integers(1, 60), st.integers(1, 60)), height=st.integers(1, 50), width=st.integers(1, 50))
def test_resize_covers_and_crops_the_centre(tmp_path, size, height, width):
    """A picture that is its own mirror image stays one, whichever side is cut."""
    half = gradient(1, height, width)[0]
    picture = np.concatenate([half, half[:, ::-1]], axis=1)
    Image.fromarray(picture).save(tmp_path / "a.png")
    loaded = load_image(tmp_path / "a.png", size)
    assert loaded.shape == (size[1], size[0], 3)
    assert np.abs(loaded - loaded[:, ::-1]).max() <= 2 / 255


def test_equal_frames_give_equal_files(tmp_path: Path) -> None:
    """Whatever the memory held before. x264's AVX-512 fails here, see `mp4._instructions`."""
    random = torch.Generator().manual_seed(0)
    clouds = torch.rand(5, 3, 33, 61, generator=random)
    smooth = torch.nn.functional.interpolate(clouds, size=(256, 480), mode="bilinear") * 255
    noisy = (smooth + 20 * torch.randn(smooth.shape, generator=random)).clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    contents = set()
    for _ in range(5):
        memory = [torch.randn(int(size)) for size in torch.randint(100, 40_000, (60,))]
        del memory
        contents.add(write_mp4(tmp_path / "same.mp4", noisy, fps=16).read_bytes())
    assert len(contents) == 1

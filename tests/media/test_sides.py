"""Pictures and videos that are very narrow: refused before any work, in every door."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tools.hostile.media import png
from wan_core.checkpoint.save import save_latents
from wan_core.cli import main
from wan_core.config import OptionError
from wan_core.config.limits import MAX_SIDE
from wan_core.media.fit import fit_covering, fit_with_bars
from wan_core.media.mp4 import write_video
from wan_core.media.video import fit_image, load_image, picture_size

NARROW = ((60_000, 1), (1, 60_000), (2, MAX_SIDE + 1), (2, 26_000_000))
WORDS = rf"at most {MAX_SIDE} in each direction"


@pytest.mark.parametrize(("width", "height"), NARROW)
def test_a_narrow_picture_is_refused(width: int, height: int, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(png(width, height, rows=1))
    for read in (picture_size, load_image, lambda path: load_image(path, (64, 48))):
        with pytest.raises(OptionError, match=f"{width}x{height} pixels; .* {WORDS}"):
            read(tmp_path / "x.png")
    if width * height < 10**6:
        pixels = np.zeros((height, width, 3), np.uint8)
        for fit in (fit_with_bars, fit_covering, lambda one, size: fit_image(one.astype(np.float32), size)):
            with pytest.raises(OptionError, match=WORDS):
                fit(pixels, (64, 48))


@pytest.mark.parametrize("ending", [".mp4", ""])
def test_no_encoder_is_given_such_frames(ending: str, tmp_path: Path) -> None:
    frames = np.zeros((2, 2, MAX_SIDE + 1, 3), np.uint8)
    with pytest.raises(OptionError, match=rf"{MAX_SIDE + 1}x2 pixels cannot be written; {WORDS}"):
        write_video(tmp_path / f"x{ending}", frames, fps=8)
    assert not list(tmp_path.iterdir())


def test_the_command_line_refuses_before_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A picture that is too narrow; one whose aspect makes the video too narrow; a size; latents of such a video."""
    (tmp_path / "wide.png").write_bytes(png(60_000, 1))
    (tmp_path / "long.png").write_bytes(png(16_000, 1))
    save_latents(tmp_path / "a.latents.safetensors", torch.zeros(1, 16, 1, 1, 3000), 8, {})
    make = ["generate", "--model", "tiny", "--prompt", "a red circle", "--steps", "1", "--frames", "1"]
    video = ["--out", str(tmp_path / "x.mp4")]
    for command, message in (
        ([*make, *video, "--image", str(tmp_path / "wide.png")], "60000x1 pixels"),
        ([*make, *video, "--image", str(tmp_path / "long.png")], "taken from a picture's aspect"),
        ([*make, *video, "--size", "16000x16"], "size 16000x16 given"),
        (["decode", str(tmp_path / "a.latents.safetensors"), "--model", "tiny", *video], "24000x8 pixels cannot be"),
    ):
        assert main(command) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x.mp4").exists()

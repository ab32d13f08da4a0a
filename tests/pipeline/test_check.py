"""A request with every default filled in: the size and length that a video to start from, or a picture, gives it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from wan_core.config import OptionError, Request, UserError
from wan_core.media.mp4 import write_mp4
from wan_core.media.video import VideoFacts
from wan_core.models.vae.config import VAE_21, VAE_22, VAEConfig
from wan_core.models.wan.families import Task, find_task
from wan_core.pipeline import check
from wan_core.pipeline.check import make_job, size_of_video
from wan_core.sampling.build import ModelFacts

DIT = find_task("t2v-A14B").full_size  # patches of 2 x 2 latents, as of all models
SIDES = st.integers(16, 2000)
MODELS = {"t2v-A14B": (VAE_21, 16), "i2v-A14B": (VAE_21, 16), "ti2v-5B": (VAE_22, 32)}


def fits(task: Task, vae: VAEConfig, size: tuple[int, int], picture: tuple[int, int], multiple: int) -> None:
    """The size has about the task's area and the picture's aspect, as far as multiples allow."""
    width, height = size
    assert width % multiple == height % multiple == 0
    scale = (task.width * task.height / (picture[0] * picture[1])) ** 0.5
    for side, of_picture in zip(size, picture, strict=True):
        assert abs(side - of_picture * scale) < multiple * max(1.0, picture[0] / picture[1], picture[1] / picture[0])
    if max(picture) > 1.2 * min(picture):
        assert (width > height) == (picture[0] > picture[1])


@given(name=st.sampled_from(sorted(MODELS)), size=st.tuples(SIDES, SIDES), count=st.integers(1, 90))
def test_a_video_to_start_from_gives_its_aspect_and_length(name: str, size: tuple[int, int], count: int) -> None:
    task, (vae, multiple) = find_task(name), MODELS[name]
    if max(size) > 6 * min(size):
        size = size[0], size[0]
    source, asked, rate = "source.mp4", [], 2 * task.fps  # of the file: every second frame is taken

    def video_facts(path: str, until: float) -> VideoFacts:
        asked.append((path, until))
        return VideoFacts(*size, 2 * count, rate, 2 * count / rate, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "video_facts", video_facts)
        *size_found, frames, fps = size_of_video(Request(prompt="", from_video=source), task, DIT, vae)
        fits(task, vae, (size_found[0], size_found[1]), size, multiple)
        assert frames % 4 == 1 and frames <= min(count, task.frames) < frames + 4 and fps == task.fps
        assert asked == [(source, task.frames / task.fps)]
        mine = Request(prompt="", from_video=source, width=64, height=32, frames=17, fps=task.fps)
        if count < 17:
            with pytest.raises(OptionError, match=f"has {count} frames at {task.fps} frames per second, and 17 are"):
                size_of_video(mine, task, DIT, vae)
        else:
            assert size_of_video(mine, task, DIT, vae) == (64, 32, 17, task.fps)


def test_width_and_height_are_those_of_the_file(tmp_path: Path) -> None:
    """Wide files give wide videos, read from a video and from a picture; without either, the task's own size."""
    video, picture = tmp_path / "wide.mp4", tmp_path / "wide.png"
    write_mp4(video, np.zeros((5, 32, 96, 3), np.uint8), fps=8)
    Image.new("RGB", (96, 32)).save(picture)
    task = find_task("ti2v-5B")
    for request in (Request(prompt="", from_video=video), Request(prompt="", image=picture)):
        width, height, *_ = size_of_video(request, task, DIT, VAE_22)
        fits(task, VAE_22, (width, height), (96, 32), 32)
    assert size_of_video(Request(prompt=""), task, DIT, VAE_22) == (task.width, task.height, task.frames, task.fps)


@pytest.mark.parametrize("field", ["image", "last_image"])
def test_a_picture_that_cannot_be_read_is_refused_before_weights_are(field: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.new("RGB", (96, 32)).save(good)
    bad.write_bytes(good.read_bytes()[:20])
    request = Request(prompt="", **{"image": good, field: bad})
    with pytest.raises(UserError, match=r"bad\.png"):
        make_job(request, ModelFacts(task=find_task("i2v-A14B"), dit=DIT, vae=VAE_22))

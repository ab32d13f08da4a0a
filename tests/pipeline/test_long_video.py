"""What a plan says of a video that is made clip by clip."""

from __future__ import annotations

import pytest
from PIL import Image

from wan_core.cli import main
from wan_core.config import LoadOptions, Request
from wan_core.models.wan.families import TASKS, family_of
from wan_core.pipeline.pipeline import Pipeline

FAMILIES_THAT_CUT = ("animate-14B", "animate2-14B", "i2v-A14B")


def test_the_cost_of_all_clips_is_that_of_their_latent_frames() -> None:
    for task in FAMILIES_THAT_CUT:
        for frames in range(1, 400, 7):
            long = family_of(TASKS[task]).cut_video(TASKS[task], frames, 33, 1)
            tokens = [(clip.frames - 1) // 4 + 1 + long.leading for clip in long.clips]
            assert long.cost == pytest.approx(sum(tokens) / tokens[0])
            assert long.words(20).endswith(f"{len(long.clips)} x 20 steps")
    assert family_of(TASKS["t2v-A14B"]).cut_video(TASKS["t2v-A14B"], 81).cost == 1


def plan(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main(["plan", *more]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("picture") / "first.png"
    Image.new("RGB", (32, 32)).save(path)
    return str(path)


@pytest.mark.parametrize(("frames", "latents"), [(5, 2), (7, 3), (9, 3), (12, 4)])
def test_a_video_shorter_than_a_clip_is_made_as_long_as_it_is_asked_for(
    picture: str, frames: int, latents: int
) -> None:
    asked = Request(prompt="", image=picture, width=32, height=32, frames=frames, clip_frames=13, steps=1)
    made = Pipeline.load(LoadOptions(model="tiny", task="i2v-tiny", device="cpu")).generate(asked)
    assert made.latents.shape[2] == latents and len(made.frames) == frames

"""Known frames anywhere in a video: the rule of the first and the last frame at other places, through every door."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from wan_core.cli import build_parser, main
from wan_core.cli.prompt_file import read_list
from wan_core.config import Keyframe, LoadOptions, OptionError, Request
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families.clips import Clip
from wan_core.models.wan.families.media import keyframes_of
from wan_core.models.wan.families.vace.inputs import control_of_media
from wan_core.models.wan.families.wan.inputs import frame_mask, image_channels, known_frames, known_of
from wan_core.pipeline.encode import encode_media, keyframes
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.conditioning import Conditioning
from wan_core.workers.wire import unpack

SIZE = {"width": 32, "height": 32, "frames": 9, "steps": 2}


def mask_of(unknown: Tensor) -> Tensor:
    """[4, T] of [F]."""
    return frame_mask(unknown, torch.zeros(1, 16, (len(unknown) - 1) // 4 + 1, 1, 1))[0, :, :, 0, 0]


@given(st.sets(st.integers(0, 16), min_size=1))
def test_a_frame_has_one_mask_channel_of_its_latent_frame(frames: set[int]) -> None:
    """ComfyUI's WanFirstLastFrameToVideo: 4 T entries, of which the first four are frame 0 and entry n + 3 is frame n.
    Wan22FMLF knows the four entries that end there: the same for the first frame, more than ours for others."""
    pictures = {place: torch.rand(1, 3, 1, 8, 8) for place in frames}
    video, unknown = known_frames(None, None, 17, pictures)
    native, fmlf = torch.ones(20), torch.ones(20)
    for place in frames:
        native[: 4 if place == 0 else 0] = 0
        native[place + 3] = 0
        fmlf[place : place + 4] = 0
    mask = mask_of(unknown)
    assert torch.equal(mask, native.view(5, 4).T)
    assert bool((mask >= fmlf.view(5, 4).T).all())
    assert known_of(mask[None, :, :, None, None]) == tuple(sorted(frames))
    for place in range(17):
        assert torch.equal(video[:, :, place], pictures[place][:, :, 0] if place in frames else video[:, :, place] * 0)


def test_first_and_last_frames_are_keyframes_at_their_places(image_pipe: Pipeline) -> None:
    vae, (first, last, middle) = image_pipe.models.vae(), torch.rand(3, 1, 3, 1, 32, 32) * 2 - 1
    with torch.no_grad():
        usual = image_channels(vae, first, last, 9)
        assert torch.equal(image_channels(vae, None, None, 9, {0: first, 8: last}), usual)
        more = image_channels(vae, first, last, 9, {4: middle})
    assert more[0, :4, :, 0, 0].tolist() == [[1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 1, 1]]
    assert (more[:, 4:] - usual[:, 4:]).abs().max() > 0.1


def test_what_is_known_by_a_mask_of_one_channel() -> None:
    mask = torch.ones(1, 1, 3, 2, 2)
    mask[:, :, 1] = 0
    assert known_of(mask) == (1, 2, 3, 4)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    paths = [folder / f"{number}.png" for number in range(3)]
    for path in paths:
        Image.fromarray(random.integers(0, 255, (32, 32, 3), np.uint8)).save(path)
    return [str(path) for path in paths]


def channels(image_pipe: Pipeline, **fields: object) -> Tensor:
    run = image_pipe.prepare(Request(prompt="x", **{**SIZE, **fields}))  # type: ignore[arg-type]
    concat = encode_media(run, Conditioning(cond=torch.zeros(1, 1, 4096))).concat
    assert concat is not None
    return concat


def test_a_request_s_keyframes_reach_the_model(image_pipe: Pipeline, pictures: list[str]) -> None:
    first, middle, last = pictures
    keyframes = Keyframe(frame=8, path=last), Keyframe(frame=0, path=first)
    assert torch.equal(channels(image_pipe, keyframes=keyframes), channels(image_pipe, image=first, last_image=last))
    concat = channels(image_pipe, image=first, keyframes=(Keyframe(frame=6, path=middle),))
    assert concat[0, :4, :, 0, 0].tolist() == [[1, 0, 0], [1, 0, 1], [1, 0, 0], [1, 0, 0]]


def test_each_clip_has_its_own_keyframes(image_pipe: Pipeline, pictures: list[str]) -> None:
    """A frame that a clip carries over was known in the one before."""
    run_keyframes = tuple(Keyframe(frame=frame, path=pictures[1]) for frame in (4, 8, 12))
    fields = {**SIZE, "frames": 17, "clip_frames": 9, "overlap": 1}
    run = image_pipe.prepare(Request(prompt="x", image=pictures[0], keyframes=run_keyframes, **fields))  # type: ignore[arg-type]
    places = [list(keyframes_of(keyframes(run, clip))) for clip in run.job.clips]
    assert [clip.first for clip in run.job.clips] == [0, 8] and places == [[4, 8], [4]]


def test_vace_keeps_keyframes() -> None:
    seen: list[Tensor] = []

    def encode(video: Tensor) -> Tensor:
        seen.append(video)
        return torch.zeros(1, 16, 3, 2, 2)

    picture = torch.rand(1, 3, 1, 16, 16)
    media = {"mask": torch.ones(1, 3, 9, 16, 16), "keyframes": picture, "keyframes_at": torch.tensor([4])}
    control_of_media(encode, media, Clip(0, 0, 9, 0), VAE_21)
    unchanged, changed = seen
    assert torch.equal(unchanged[:, :, 4], picture[:, :, 0]) and not changed.any()
    assert not unchanged[:, :, [0, 1, 2, 3, 5, 6, 7, 8]].any()


@pytest.mark.parametrize(
    ("frames", "message"),
    [((9,), "9 given for a video of 9 frames"), ((4, 4), "frame 4 is known twice"), ((0,), "frame 0 is known twice")],
)
def test_keyframes_outside_and_frames_that_are_known_twice_are_refused(
    image_pipe: Pipeline, pictures: list[str], frames: tuple[int, ...], message: str
) -> None:
    keyframes = tuple(Keyframe(frame=frame, path=pictures[1]) for frame in frames)
    with pytest.raises(OptionError, match=message):
        image_pipe.prepare(Request(prompt="x", image=pictures[0], keyframes=keyframes, **SIZE))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "message"),
    [("t2v-A14B", "takes no image"), ("ti2v-5B", "first frame only"), ("animate-14B", "takes no --keyframe")],
)
def test_a_task_that_cannot_says_so(task: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--task", task, "--keyframe", "4"]) == 2
    assert message in capsys.readouterr().err


def test_lists_of_videos_and_workers_take_keyframes(tmp_path: Path, pictures: list[str]) -> None:
    """A line's own take the place of the command line's, and its key is of what the pictures hold."""
    listed = tmp_path / "list.jsonl"
    same = tmp_path / "same.png"
    same.write_bytes(Path(pictures[1]).read_bytes())
    lines = [
        {"prompt": "a"},
        {"prompt": "a", "keyframes": [f"4={pictures[1]}", f"6={pictures[2]}"]},
        {"prompt": "a", "keyframes": f"4={pictures[1]}"},
        {"prompt": "a", "keyframes": f"4={same}"},
    ]
    listed.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["generate", "--model=tiny", f"--prompts={listed}", f"--keyframe=8={pictures[0]}", "--out=x.mp4"]
    videos = read_list(listed, build_parser().parse_args(arguments), LoadOptions(model="tiny"))
    frames = [[one.frame for one in video.request.keyframes or ()] for video in videos]
    assert frames == [[8], [4, 6], [4], [4]]
    assert videos[2].key == videos[3].key and len({video.key for video in videos}) == 3
    sent = json.loads(json.dumps(asdict(videos[1].request)))
    assert unpack(Request, sent) == videos[1].request

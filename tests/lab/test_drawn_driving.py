"""Drawn trios: one has the look, the other the motion, the third both; `follows` tells motions apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wan_lab.driving import Trio, draw_trios, follows, other_looks
from wan_lab.metrics import describe, judge, track
from wan_lab.shapes import SCENES, held_out, scene_table

HELD_OUT = [scene for scene in SCENES if held_out(scene)]
LOOKS = HELD_OUT[3::7][:4]


def drawn(curved_share: float, height: int = 96, width: int = 96) -> Trio:
    generator = torch.Generator().manual_seed(3)
    return draw_trios(
        scene_table(LOOKS), generator=generator, curved_share=curved_share, frames=9, height=height, width=width
    )


def frames(videos: Tensor) -> Tensor:
    """[B, 3, F, H, W] in -1..1 -> [B, F, H, W, 3] in 0..1."""
    return videos.permute(0, 2, 3, 4, 1) / 2 + 0.5


@pytest.mark.parametrize(("curved_share", "height", "width"), [(0.0, 96, 96), (1.0, 64, 96)])
def test_the_made_video_has_one_look_and_the_others_motion(curved_share: float, height: int, width: int):
    trio = drawn(curved_share, height, width)
    assert bool(trio.is_curved.all()) == (curved_share == 1.0)
    videos, driving = frames(trio.made), frames(trio.driving)
    pictures = frames(trio.reference[:, :, None])
    for n, scene in enumerate(LOOKS):
        seen, other, picture = (describe(video) for video in (videos[n], driving[n], pictures[n]))
        assert (seen.colour, seen.shape, seen.background) == (scene.colour, scene.shape, scene.background)
        assert (picture.colour, picture.shape, picture.background) == (scene.colour, scene.shape, scene.background)
        assert other.shape != scene.shape and other.colour != scene.colour
        assert follows(videos[n], driving[n]) and not follows(videos[n], driving[n - 1])
        if not curved_share:
            assert judge(videos[n], scene).all_true and other.motion == scene.motion


def test_a_video_that_stands_still_or_shows_nothing_follows_nothing():
    trio = drawn(1.0)
    videos, driving = frames(trio.made), frames(trio.driving)
    still = [follows(one[:1].expand_as(one), other) for one, other in zip(videos, driving, strict=True)]
    assert sum(still) <= 2
    assert not follows(torch.full_like(videos[0], 0.5), driving[0])
    vanishing = videos[0].clone()
    vanishing[-1] = vanishing[-1, 0, 0]
    assert track(vanishing) is None and not follows(vanishing, driving[0])


def test_other_looks_keep_the_motion_and_change_the_rest():
    table = scene_table(SCENES[::9])
    others = other_looks(table, torch.Generator().manual_seed(0))
    assert torch.equal(others[:, 2], table[:, 2])
    assert (others[:, 0] != table[:, 0]).all() and (others[:, 1] != table[:, 1]).all()
    assert (others[:, 0] != others[:, 3]).all()

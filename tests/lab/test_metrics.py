"""The judge knows its own world through noise, blur and a codec; PSNR and SSIM behave as distances should."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from wan_core.pipeline.embedded import COLOURS, MOTIONS, SHAPES, Scene, parse_caption
from wan_lab.metrics import describe, judge, psnr, ssim, temporal_flicker
from wan_lab.shapes import SCENES, draw, held_out

SAMPLE = SCENES[::23]  # 23 has no divisor in common with 1,120: all words and most pairs


def frames_of(scene: Scene, seed: int = 0, frames: int = 9, height: int = 64, width: int = 64) -> Tensor:
    """[F, H, W, 3] in 0..1. Smaller than the world's own size, which is harder to judge and quicker to draw."""
    return draw([scene], seed=seed, frames=frames, height=height, width=width)[0].permute(1, 2, 3, 0) / 2 + 0.5


# ---------------------------------------------------------------------------------------------------------------- world


@pytest.mark.parametrize("scene", [SCENES[0], SCENES[500], SCENES[-1]])
def test_captions_parse_back_to_their_scene(scene: Scene):
    assert all(parse_caption(s.caption) == s for s in SCENES)
    assert parse_caption(f"  {scene.caption.upper()}. \n") == scene


@pytest.mark.parametrize(
    "caption",
    [
        "a pink circle moving right on a blue background",
        "a red star moving right on a blue background",
        "a red circle moving sideways on a blue background",
        "a red circle moving right",
        "a red circle moving right on a red background",
        "",
    ],
)
def test_captions_outside_the_grammar_are_refused_with_what_is_allowed(caption: str):
    with pytest.raises(ValueError, match=r"use one of|COLOUR is one of|different colours"):
        parse_caption(caption)


def test_held_out_scenes_leave_every_three_words_together_in_training():
    assert len(SCENES) == len(set(SCENES)) == 1120
    trained = [s for s in SCENES if not held_out(s)]
    assert len(SCENES) - len(trained) == 110
    captions = [(s.colour, s.shape, s.motion, s.background) for s in SCENES]
    kept_words = [(s.colour, s.shape, s.motion, s.background) for s in trained]
    for left_out in range(4):
        three = [{w[:left_out] + w[left_out + 1 :] for w in group} for group in (captions, kept_words)]
        assert three[0] == three[1]


# ---------------------------------------------------------------------------------------------------------------- judge


@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_scene_is_judged_right(shape: str):
    for i, scene in enumerate(s for s in SAMPLE if s.shape == shape):
        seen = describe(frames_of(scene, seed=i))
        assert seen.scene == scene, (scene, seen)


def test_every_wrong_word_is_judged_wrong_and_the_others_right():
    scene = Scene("red", "square", "left", "blue")
    frames = frames_of(scene)
    wrong = {
        "colour": [c for c in COLOURS if c not in ("red", "blue")],
        "background": [c for c in COLOURS if c not in ("red", "blue")],
        "shape": [s for s in SHAPES if s != "square"],
        "motion": [m for m in MOTIONS if m != "left"],
    }
    for field, alternatives in wrong.items():
        for word in alternatives:
            verdict = judge(frames, replace(scene, **{field: word}).caption)
            assert not verdict.all_true
            assert {f for f in wrong if not getattr(verdict, f)} == {field}


def test_heavy_noise_between_the_nearest_colours():
    for pair in (("blue", "purple"), ("orange", "red"), ("white", "yellow")):
        for shape in SHAPES:
            frames = frames_of(Scene(pair[0], shape, "up", pair[1]), 0, 9, 96, 96)
            frames = frames + 0.2 * torch.randn(frames.shape, generator=torch.Generator().manual_seed(1))
            assert describe(frames.clamp(0, 1)).scene == Scene(pair[0], shape, "up", pair[1])


@pytest.mark.parametrize("crf", [23, 35])
def test_h264_does_not_change_the_verdict(crf: int):
    av = pytest.importorskip("av")
    for i, scene in enumerate(SCENES[11::373]):
        file = io.BytesIO()
        with av.open(file, "w", format="mp4") as out:
            stream = out.add_stream("libx264", rate=16, options={"crf": str(crf)})
            stream.width = stream.height = 96
            stream.pix_fmt = "yuv420p"
            for frame in (frames_of(scene, i, 17, 96, 96) * 255).round().to(torch.uint8).numpy():
                out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            out.mux(stream.encode())
        file.seek(0)
        with av.open(file) as source:
            decoded = [torch.from_numpy(f.to_ndarray(format="rgb24")) for f in source.decode(video=0)]
        assert judge(torch.stack(decoded), scene).all_true, (scene, describe(torch.stack(decoded)))


def test_an_empty_picture_shows_nothing_and_a_blob_no_shape():
    empty = torch.full((9, 64, 64, 3), 0.5)
    assert describe(empty).colour is None
    assert describe(empty).scene is None
    # Two far corners of a frame: a colour, but nothing that any template covers.
    pieces = torch.zeros(9, 96, 96, 3)
    pieces[:, 8:30, 8:30] = 1
    pieces[:, 60:88, 60:88] = 1
    seen = describe(pieces)
    assert (seen.background, seen.colour) == ("black", "white")
    noise = torch.rand(9, 64, 64, 3, generator=torch.Generator().manual_seed(0))
    assert describe(noise).shape is None


def test_a_teleporting_and_a_diagonal_shape_have_no_motion():
    scene = Scene("yellow", "circle", "right", "purple")
    frames = frames_of(scene)
    diagonal = torch.stack([torch.roll(f, round(2.5 * (i - 4)), 0) for i, f in enumerate(frames)])
    assert describe(diagonal).motion is None
    there_and_back = torch.cat([frames[::2], frames[::2].flip(0)])
    assert describe(there_and_back).motion is None


# ------------------------------------------------------------------------------------------------------------ distances


def test_psnr_of_a_known_error():
    a = torch.full((3, 16, 16, 3), 0.5)
    assert psnr(a, a + 0.1) == pytest.approx(20, abs=1e-3)
    b = (a * 255).to(torch.uint8)
    assert psnr(b, b + 51) == pytest.approx(-20 * math.log10(0.2), abs=1e-3)


def test_more_noise_is_further_away_and_flickers_more():
    frames = frames_of(SCENES[7], frames=5, height=48, width=48) * 0.8 + 0.1
    noise = torch.randn(frames.shape, generator=torch.Generator().manual_seed(0))
    noisy = [frames + level * noise for level in (0.005, 0.02, 0.05, 0.1)]
    for measure in (lambda n: psnr(frames, n), lambda n: ssim(frames, n), lambda n: -temporal_flicker(n)):
        values = [measure(n) for n in noisy]
        assert values == sorted(values, reverse=True)

"""What a request says beside the media that drive it: a prompt of the driving video, strengths, guidance by a face."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.pipeline.test_clips import folder as media_folder  # noqa: F401
from tests.pipeline.test_clips import loaded, request
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.pipeline.encode import clip_media, condition, encode_text, load_media
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.guided import stack_text


def conditioned(pipe: Pipeline, asked: Request) -> Conditioning:
    run = pipe.prepare(asked)
    media = load_media(run)
    pixels = clip_media(run, run.job.clips[0], media, None)
    return condition(run, run.job.clips[0], pixels, encode_text(run))


@torch.no_grad()
def test_the_driving_video_has_a_prompt_of_its_own(media_folder: Path) -> None:  # noqa: F811
    pipe, asked = loaded(media_folder, "animate2"), request(media_folder, "animate2")
    plain = conditioned(pipe, asked)
    assert torch.equal(plain.inputs["pose_context"], plain.cond) and plain.uncond is not None
    told = conditioned(pipe, replace(asked, pose_prompt="a blue square"))
    expected = conditioned(pipe, replace(asked, prompt="a blue square")).cond
    assert torch.equal(told.inputs["pose_context"], expected) and torch.equal(told.cond, plain.cond)
    assert not torch.equal(expected, plain.cond)
    # Both branches of guidance are driven by the same pass.
    both, rows = plain.family_inputs(("cond", "uncond"), 1), stack_text([plain.cond, plain.uncond], 1)
    features = torch.cat([plain.image_features] * 2)
    prepared = pipe.models.expert("high").prepare_text(rows, features, **both)
    assert prepared.own.layers.videos == 1


@torch.no_grad()
def test_strengths_change_the_video_and_1_does_not(media_folder: Path) -> None:  # noqa: F811
    pipe = loaded(media_folder, "animate2")
    asked = replace(request(media_folder, "animate2"), frames=9)
    plain = pipe.generate(asked).frames
    assert np.array_equal(pipe.generate(replace(asked, pose_strength=1.0, reference_strength=1.0)).frames, plain)
    for name in ("pose_strength", "reference_strength"):
        assert conditioned(pipe, replace(asked, **{name: 0.5})).inputs[name] == 0.5
        assert not np.array_equal(pipe.generate(replace(asked, **{name: 0.0})).frames, plain)


@torch.no_grad()
def test_guidance_leads_away_from_a_still_face_or_not(media_folder: Path) -> None:  # noqa: F811
    pipe = loaded(media_folder, "animate")
    asked = replace(request(media_folder, "animate"), frames=9)
    plain = conditioned(pipe, asked)
    assert torch.equal(plain.uncond_inputs["face"], torch.full_like(plain.inputs["face"], -1))
    assert conditioned(pipe, replace(asked, face_guidance=False)).uncond_inputs == {}
    one, other, same = (pipe.generate(replace(asked, face_guidance=wanted)).frames for wanted in (None, False, True))
    assert np.array_equal(one, same) and not np.array_equal(one, other)


def test_settings_that_a_family_does_not_take_are_refused(media_folder: Path) -> None:  # noqa: F811
    for family, changed, option in (
        ("animate", {"pose_prompt": "x"}, "--pose-prompt"),
        ("animate", {"reference_strength": 1.0}, "--pose-strength"),
        ("animate2", {"face_guidance": True}, "--face-guidance"),
    ):
        with pytest.raises(OptionError, match=f"does not take {option}"):
            loaded(media_folder, family).prepare(replace(request(media_folder, family), **changed))
    tiny = Pipeline.load(LoadOptions(model="tiny", task="t2v-tiny", device="cpu"))
    with pytest.raises(OptionError, match="does not take --pose-strength"):
        tiny.prepare(Request(prompt="a", pose_strength=0.5))
    for wrong in (-0.1, float("nan"), 11):
        with pytest.raises(OptionError, match="pose strength"):
            Request(prompt="a", pose_strength=wrong)

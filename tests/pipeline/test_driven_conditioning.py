"""What ComfyUI's WanAnimateToVideo and WanAnimate2ToVideo give -> what the transformers of Animate take."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.animate_references import ANIMATE2, TINY_ANIMATE, draw_weights
from wan_core.config import OptionError
from wan_core.models.vae.config import VAE_21
from wan_core.models.vae.statistics import normalise
from wan_core.models.wan.families.animate2.config import DISTILLED_LOG_SCALE
from wan_core.models.wan.tasks import find_task, image_task
from wan_core.pipeline.comfy_conditioning import join
from wan_core.pipeline.model_parts import Experts
from wan_core.pipeline.sources import find_experts
from wan_core.sampling.plan import Plan, make_plan
from wan_core.sampling.sparsity.schedule import parse_sparse, sparsify

T, Y, X = 3, 4, 6
LATENT = {"samples": torch.zeros(1, 16, T, Y, X)}
SEEN, SEEN_POSE = (
    SimpleNamespace(penultimate_hidden_states=torch.full((1, 257, 1280), value)) for value in (0.5, -0.5)
)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> dict[str, Experts]:
    folder, found = tmp_path_factory.mktemp("models"), {}
    claimed = {"config": '{"transformer": {"model_type": "animate2"}}', "num_heads": "2"}
    for name, config, said in (("animate", TINY_ANIMATE, {}), ("animate2", ANIMATE2, claimed)):
        save_file(draw_weights(config), folder / f"wan_{name}.safetensors", said)
        found[name] = find_experts(folder / f"wan_{name}.safetensors")
    return found


def plan_of(guidance: float = 2.0) -> Plan:
    return make_plan(task="animate-14B", steps=2, guidance_high=guidance, guidance_low=guidance)


def given(seed: int, **extras: Any) -> list[list[Any]]:
    shared = {
        "concat_latent_image": torch.ones(1, 16, T, Y, X),
        "concat_mask": torch.zeros(1, 4, T, Y, X),
        "clip_vision_output": SEEN,
        "pose_video_latent": torch.full((1, 16, T - 1, Y, X), 0.25),
    }
    return [[torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(seed)), shared | extras]]


def test_animate_is_told_pose_and_face(experts):
    face = torch.rand(1, 3, 5, 16, 16)
    positive, negative = given(1, face_video_pixels=face), given(2, face_video_pixels=face * 0 - 1)
    found = join(positive, negative, LATENT, experts["animate"], plan_of()).conditioning
    assert found.concat is not None and found.concat.shape == (1, 20, T, Y, X)
    assert found.image_features is not None and set(found.inputs) == {"pose", "face"}
    assert torch.equal(found.inputs["pose"], normalise(torch.full((1, 16, T - 1, Y, X), 0.25), VAE_21))
    assert torch.equal(found.family_inputs(["cond", "uncond"], 1)["face"], torch.cat([face, face * 0 - 1]))
    assert torch.equal(found.family_inputs(["cond"], 1)["face"], face)
    alone = join(positive, negative, LATENT, experts["animate"], plan_of(1.0)).conditioning
    assert not alone.uncond_inputs
    with pytest.raises(OptionError, match="only one of `positive` and `negative` has face"):
        join(positive, given(2), LATENT, experts["animate"], plan_of())
    long = torch.zeros(1, 16, T, Y, X)
    with pytest.raises(OptionError, match="not one size"):
        join(*(given(n, pose_video_latent=long) for n in (1, 2)), LATENT, experts["animate"], plan_of())


def test_animate2_is_told_its_driving_video(experts):
    rows = torch.randn(1, 7, 24)
    own = {"cross_attn_pose": rows, "clip_vision_output_pose": SEEN_POSE, "pose_strength": 0.5}
    found = join(given(1, **own), given(2, **own), LATENT, experts["animate2"], plan_of()).conditioning
    latents = normalise(torch.full((1, 16, T - 1, Y, X), 0.25), VAE_21)
    expected = torch.cat([latents, torch.ones(1, 4, T - 1, Y, X), latents], 1)
    assert torch.equal(found.inputs["pose"], expected) and torch.equal(found.inputs["pose_context"], rows)
    assert float(found.inputs["pose_image"][0, 0, 0]) == -0.5 and found.inputs["pose_strength"] == 0.5
    both = found.family_inputs(["cond", "uncond"], 2)
    assert both["unconditional"] == [False, False, True, True] and both["pose"] is found.inputs["pose"]
    assert found.inputs["log_scale"] == 0 and found.inputs["reference_strength"] == 1
    distilled = replace(experts["animate2"], task=find_task("animate2-14B-distilled"))
    found = join(given(1, **own), given(2, **own), LATENT, distilled, plan_of()).conditioning
    assert found.inputs["log_scale"] == DISTILLED_LOG_SCALE


def test_what_they_cannot_do_is_refused(experts):
    sparse = sparsify(plan_of(), parse_sparse("0.5/0/0:ramp0"))
    distilled = replace(experts["animate2"], task=find_task("animate2-14B-distilled"))
    with pytest.raises(OptionError, match="sparse attention: distilled weights of Animate-2"):
        join(given(1), given(2), LATENT, distilled, sparse)
    join(given(1), given(2), LATENT, experts["animate2"], sparse)
    with pytest.raises(OptionError, match="carries face_video_pixels, which this model does not take"):
        join(given(1, face_video_pixels=torch.zeros(1)), given(2), LATENT, experts["animate2"], plan_of())
    ranges = [given(1, start_percent=0.0, end_percent=0.5)[0], given(1, start_percent=0.5, pose_video_latent=None)[0]]
    with pytest.raises(OptionError, match="different values of pose_video_latent"):
        join(ranges, given(2), LATENT, experts["animate2"], plan_of())


def test_a_task_of_an_image_needs_no_videos():
    assert not image_task(16).driven_by

"""What ComfyUI's WanAnimateToVideo and WanAnimate2ToVideo give -> what the transformers of Animate take."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.animate_references import ANIMATE2, TINY_ANIMATE, draw_weights
from wan_core.config import OptionError, SkipOptions, SparseOptions, TaylorSeerOptions
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families import find_task, image_task
from wan_core.models.wan.families.animate2 import ANIMATE2_14B, DISTILLED_LOG_SCALE
from wan_core.pipeline.comfy_conditioning import join
from wan_core.pipeline.model_parts import Parts
from wan_core.pipeline.sources import find_experts
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.plan import Plan, make_plan
from wan_core.sampling.sparsity.schedule import sparsify, with_costs
from wan_core.workers.wire import unpack

T, Y, X = 3, 4, 6
LATENT = {"samples": torch.zeros(1, 16, T, Y, X)}
SEEN, SEEN_POSE = (
    SimpleNamespace(penultimate_hidden_states=torch.full((1, 257, 1280), value)) for value in (0.5, -0.5)
)


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> dict[str, Parts]:
    folder, loaded = tmp_path_factory.mktemp("models"), {}
    claimed = {"config": '{"transformer": {"model_type": "animate2"}}', "num_heads": "2"}
    for name, config, said in (("animate", TINY_ANIMATE, {}), ("animate2", ANIMATE2, claimed)):
        save_file(draw_weights(config), folder / f"wan_{name}.safetensors", said)
        loaded[name] = find_experts(folder / f"wan_{name}.safetensors")
    return loaded


def plan_of(guidance: float = 2.0) -> Plan:
    return make_plan(task="animate-14B", steps=2, guidance_high=guidance, guidance_low=guidance)


def prompt_rows(seed: int, **extras: Any) -> list[list[Any]]:
    shared = {
        "concat_latent_image": torch.ones(1, 16, T, Y, X),
        "concat_mask": torch.zeros(1, 4, T, Y, X),
        "clip_vision_output": SEEN,
        "pose_video_latent": torch.full((1, 16, T - 1, Y, X), 0.25),
    }
    return [[torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(seed)), shared | extras]]


def test_animate_is_told_pose_and_face(experts):
    face = torch.rand(1, 3, 5, 16, 16)
    positive, negative = prompt_rows(1, face_video_pixels=face), prompt_rows(2, face_video_pixels=face * 0 - 1)
    conditioning = join(positive, negative, LATENT, experts["animate"], plan_of()).conditioning
    assert conditioning.concat is not None and conditioning.concat.shape == (1, 20, T, Y, X)
    assert conditioning.image_features is not None and set(conditioning.inputs) == {"pose", "face"}
    assert torch.equal(conditioning.inputs["pose"], VAE_21.normalise(torch.full((1, 16, T - 1, Y, X), 0.25)))
    assert torch.equal(conditioning.family_inputs(["cond", "uncond"], 1)["face"], torch.cat([face, face * 0 - 1]))
    assert torch.equal(conditioning.family_inputs(["cond"], 1)["face"], face)
    alone = join(positive, negative, LATENT, experts["animate"], plan_of(1.0)).conditioning
    assert not alone.uncond_inputs
    with pytest.raises(OptionError, match="only one of `positive` and `negative` has face"):
        join(positive, prompt_rows(2), LATENT, experts["animate"], plan_of())
    long = torch.zeros(1, 16, T, Y, X)
    with pytest.raises(OptionError, match="not one size"):
        join(*(prompt_rows(n, pose_video_latent=long) for n in (1, 2)), LATENT, experts["animate"], plan_of())


def test_animate2_is_told_its_driving_video(experts):
    rows = torch.randn(1, 7, 24)
    own = {"cross_attn_pose": rows, "clip_vision_output_pose": SEEN_POSE, "pose_strength": 0.5}
    conditioning = join(
        prompt_rows(1, **own), prompt_rows(2, **own), LATENT, experts["animate2"], plan_of()
    ).conditioning
    latents = VAE_21.normalise(torch.full((1, 16, T - 1, Y, X), 0.25))
    expected = torch.cat([latents, torch.ones(1, 4, T - 1, Y, X), latents], 1)
    assert torch.equal(conditioning.inputs["pose"], expected) and torch.equal(conditioning.inputs["pose_context"], rows)
    assert float(conditioning.inputs["pose_image"][0, 0, 0]) == -0.5 and conditioning.inputs["pose_strength"] == 0.5
    both = conditioning.family_inputs(["cond", "uncond"], 2)
    assert both["unconditional"] == [False, False, True, True] and both["pose"] is conditioning.inputs["pose"]
    assert conditioning.inputs["log_scale"] == 0 and conditioning.inputs["reference_strength"] == 1
    distilled = replace(experts["animate2"], task=find_task("animate2-14B-distilled"))
    conditioning = join(prompt_rows(1, **own), prompt_rows(2, **own), LATENT, distilled, plan_of()).conditioning
    assert conditioning.inputs["log_scale"] == DISTILLED_LOG_SCALE


def test_what_they_cannot_do_is_refused(experts):
    sparse = sparsify(plan_of(), SparseOptions.parse("0.5:ramp0"))
    distilled = replace(experts["animate2"], task=find_task("animate2-14B-distilled"))
    with pytest.raises(OptionError, match="sparse attention: distilled weights of Animate-2"):
        join(prompt_rows(1), prompt_rows(2), LATENT, distilled, sparse)
    join(prompt_rows(1), prompt_rows(2), LATENT, experts["animate2"], sparse)
    with pytest.raises(OptionError, match="carries face_video_pixels, which this model does not take"):
        join(prompt_rows(1, face_video_pixels=torch.zeros(1)), prompt_rows(2), LATENT, experts["animate2"], plan_of())
    ranges = [
        prompt_rows(1, start_percent=0.0, end_percent=0.5)[0],
        prompt_rows(1, start_percent=0.5, pose_video_latent=None)[0],
    ]
    with pytest.raises(OptionError, match="different values of pose_video_latent"):
        join(ranges, prompt_rows(2), LATENT, experts["animate2"], plan_of())


def test_a_task_of_an_image_needs_no_videos():
    assert not image_task(16).driven_by


def windowed(seed: int, start: float, end: float, **extras: Any) -> list[list[Any]]:
    """A driving video for a part of the run, made like ComfyUI's WanAnimate2ToVideo does, all of the same text."""
    [[rows, shared]] = prompt_rows(seed, **extras)
    undriven = {key: value for key, value in shared.items() if key not in DRIVING}
    parts = [({**shared}, start, end), (undriven, 0.0, start), (undriven, end, 1.0)]
    return [[rows, {**one, "start_percent": a, "end_percent": b}] for one, a, b in parts if (a, b) not in EMPTY]


EMPTY = ((0.0, 0.0), (1.0, 1.0))
DRIVING = ("pose_video_latent", "clip_vision_output_pose", "cross_attn_pose", "pose_strength")
OWN = {"cross_attn_pose": torch.zeros(1, 7, 24), "clip_vision_output_pose": SEEN_POSE, "pose_strength": 0.5}


@pytest.mark.parametrize(
    ("start", "end", "undriven", "passes"),
    [
        (0.0, 0.5, "0000b111", 1),
        (0.3, 0.8, "11100001", 1),
        (0.6, 1.0, "11111000", 1),
        (0.96, 0.98, "11111111", 0),
    ],
)
def test_a_driving_video_for_a_part_of_the_run(experts, start, end, undriven, passes):
    """Shift 1: a step begins at every eighth of the run, and one on the border (b) is averaged, as by ComfyUI. The text
    is prepared again where the video begins or ends to be read, and is one text all the same: steps may be skipped, but
    for those that nothing was kept for."""
    whole = make_plan(task="animate2-14B", steps=8, shift=1.0, solver="euler", guidance_high=2.0, guidance_low=2.0)
    joined = join(windowed(1, start, end, **OWN), windowed(2, start, end, **OWN), LATENT, experts["animate2"], whole)
    steps = joined.plan.steps
    marks = ["".join("01"[one.undriven] for one in step.conditions) for step in steps]
    assert "".join("b" if one == "01" else one for one in marks) == undriven
    forwards = 16 + 2 * undriven.count("b") + passes
    assert sum(step.passes for step in steps) == passes and joined.plan.forwards == forwards
    assert {step.texts for step in steps} == {(0, 0)} and joined.conditioning.later_cond == ()
    assert joined.conditioning.inputs["pose_strength"] == 0.5 and "pose_context" in joined.conditioning.inputs
    assert f"driving video: read in {8 - undriven.count('1')} of 8 steps" in joined.plan.notes
    without_own = [windowed(n, start, end) for n in (1, 2)]
    assert sum(s.passes for s in join(*without_own, LATENT, experts["animate2"], whole).plan.steps) == 2 * passes
    costs = [step.cost for step in with_costs(joined.plan, ANIMATE2_14B, (22, 90, 160)).steps]
    for cost, step in zip(costs, steps, strict=True):
        assert (cost < 1) == (step.undriven or step.passes > 0)
    assert unpack(Plan, json.loads(json.dumps(asdict(joined.plan)))) == joined.plan


def test_what_is_kept_does_not_cross_the_border_of_a_driving_video(experts):
    plan = make_plan(task="animate2-14B", steps=12, shift=1.0, solver="euler", guidance_high=2.0, guidance_low=2.0)
    skip = SkipOptions(taylorseer=TaylorSeerOptions(interval=2, retention=0.0))
    skipping = skip_forwards(plan, skip, None, None)
    joined = join(windowed(1, 0.0, 0.45, **OWN), windowed(2, 0.0, 0.45, **OWN), LATENT, experts["animate2"], skipping)
    first = next(step for step in joined.plan.steps if step.undriven)
    assert first.index == 6 and not first.skipped and any(step.skipped for step in joined.plan.steps[7:])
    assert joined.plan.steps[:6] == skipping.steps[:6]
    joined = join(windowed(1, 0.0, 0.5, **OWN), windowed(2, 0.0, 0.5, **OWN), LATENT, experts["animate2"], skipping)
    both = next(step for step in joined.plan.steps if step.also)
    assert both.index == 6 and not any(step.skipped for step in joined.plan.steps[6:8])
    assert any(step.skipped for step in joined.plan.steps[8:])


def test_the_branches_of_a_step_agree_on_the_driving_video(experts):
    whole = make_plan(task="animate2-14B", steps=8, shift=1.0, guidance_high=2.0, guidance_low=2.0)
    with pytest.raises(OptionError, match="different values of pose_video_latent for step 3"):
        join(windowed(1, 0.0, 0.5), windowed(2, 0.0, 0.3), LATENT, experts["animate2"], whole)
    driven = windowed(1, 0.3, 0.8)
    driven[0][1]["pose_strength"] = 0.7
    joined = join(driven, prompt_rows(2, pose_video_latent=None), LATENT, experts["animate2"], whole)
    assert sum(step.undriven for step in joined.plan.steps) == 4, "both branches take what the prompt has"
    assert not any(
        step.undriven for step in join(prompt_rows(1), prompt_rows(2), LATENT, experts["animate2"], whole).plan.steps
    )
    none = [prompt_rows(n, pose_video_latent=None) for n in (1, 2)]
    undriven = join(*none, LATENT, experts["animate2"], whole).plan
    assert all(step.undriven for step in undriven.steps) and undriven.forwards == 16

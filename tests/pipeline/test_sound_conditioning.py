"""What ComfyUI's WanSoundImageToVideo and WanSoundImageToVideoExtend give -> what the transformer of S2V takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.animate_references import draw_weights
from tests.s2v_references import S2V
from wan_core.config import LoadOptions, OptionError, Request
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families import find_task
from wan_core.models.wan.families.s2v import COMFYUI_POSITIONS
from wan_core.pipeline.check import check_request
from wan_core.pipeline.comfy_conditioning import join
from wan_core.pipeline.model_parts import Parts
from wan_core.pipeline.sources import find_experts
from wan_core.sampling.plan import Plan, make_plan

T, Y, X = 3, 8, 10
LATENT = {"samples": torch.zeros(1, 16, T, Y, X)}
AUDIO = torch.rand(1, 25, 1024, 4 * T)
REFERENCE, MOTION, POSE = (torch.randn(1, 16, frames, Y, X) for frames in (1, 19, T))


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Parts:
    path = tmp_path_factory.mktemp("models") / "wan2.2_s2v.safetensors"
    save_file(draw_weights(S2V), path, {"num_heads": "2"})
    return find_experts(path)


def plan_of(guidance: float = 2.0) -> Plan:
    return make_plan(task="s2v-14B", steps=2, guidance_high=guidance, guidance_low=guidance)


def prompt_rows(seed: int, **extras: Any) -> list[list[Any]]:
    """ComfyUI's conditioning: each prompt has its own lists, and the negative one hears zeros."""
    own = {
        "audio_embed": AUDIO if seed == 1 else AUDIO * 0,
        "reference_latents": [torch.zeros(1, 16, 1, 2, 2), REFERENCE],
        "reference_motion": MOTION,
        "control_video": POSE,
    }
    return [[torch.randn(1, 5, 24, generator=torch.Generator().manual_seed(seed)), own | extras]]


def test_all_inputs_arrive(experts):
    assert experts.task.name == "s2v-14B"
    conditioning = join(prompt_rows(1), prompt_rows(2), LATENT, experts, plan_of()).conditioning
    assert set(conditioning.inputs) == {"audio", "reference", "motion", "pose"}
    for name, raw in {"reference": REFERENCE, "motion": MOTION, "pose": POSE}.items():
        assert torch.equal(conditioning.inputs[name], VAE_21.normalise(raw))
    both = conditioning.family_inputs(["cond", "uncond"], 2)
    assert torch.equal(both["audio"], torch.cat([AUDIO, AUDIO, AUDIO * 0, AUDIO * 0]))
    alone = join(prompt_rows(1), prompt_rows(2), LATENT, experts, plan_of(1.0)).conditioning
    assert not alone.uncond_inputs


def test_what_is_not_given_is_left_out(experts):
    bare = {"audio_embed": None, "reference_latents": None, "reference_motion": None}
    conditioning = join(prompt_rows(1, **bare), prompt_rows(2, **bare), LATENT, experts, plan_of()).conditioning
    assert set(conditioning.inputs) == {"pose"}
    longer = torch.cat([AUDIO, AUDIO], -1)  # the rest of the sound is of later clips
    conditioning = join(
        prompt_rows(1, audio_embed=longer), prompt_rows(2, audio_embed=longer), LATENT, experts, plan_of()
    ).conditioning
    assert torch.equal(conditioning.inputs["audio"], AUDIO)


def test_comfyui_positions_are_asked_for_by_name(experts):
    """Only the prompt carries the name, which WanCore Motion Positions sets."""
    for asked in (True, False):
        conditioning = join(
            prompt_rows(1, **{COMFYUI_POSITIONS: asked}), prompt_rows(2), LATENT, experts, plan_of()
        ).conditioning
        assert conditioning.inputs.get("comfyui_positions", False) is asked
        assert ("comfyui_positions" in conditioning.uncond_inputs) is asked


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"audio_embed": AUDIO[..., :-1]}, "needs 12 frames of them"),
        ({"reference_latents": [POSE]}, "latents of the reference"),
        ({"reference_motion": MOTION[..., :-2]}, "latents of the motion"),
        ({"control_video": POSE[:, :, :-1]}, "latents of the pose"),
        ({"face_video_pixels": POSE}, "carries face_video_pixels, which this model does not take"),
    ],
)
def test_what_does_not_fit_is_refused(experts, changed, message):
    with pytest.raises(OptionError, match=message):
        join(prompt_rows(1, **changed), prompt_rows(2, **changed), LATENT, experts, plan_of())


def test_one_prompt_without_sound_is_refused(experts):
    with pytest.raises(OptionError, match="only one of `positive` and `negative` has audio"):
        join(prompt_rows(1), prompt_rows(2, audio_embed=None), LATENT, experts, plan_of())


def test_a_small_video_with_motion_and_a_noise_mask_are_refused(experts):
    small = {"samples": torch.zeros(1, 16, T, 6, X)}
    extras = {"reference_latents": None, "control_video": None, "reference_motion": MOTION[..., :6, :]}
    with pytest.raises(OptionError, match="at least 64 pixels"):
        join(prompt_rows(1, **extras), prompt_rows(2, **extras), small, experts, plan_of())
    with pytest.raises(OptionError, match="noise mask"):
        join(prompt_rows(1), prompt_rows(2), LATENT | {"noise_mask": torch.ones(1)}, experts, plan_of())


def test_the_command_line_says_that_it_needs_a_sound():
    options = LoadOptions(model="random:s2v-14B:1", device="cpu")
    with pytest.raises(OptionError, match="give --reference and --audio"):
        check_request(options, Request(prompt="x"), torch.device("cpu"))
    assert find_task("s2v-14B").driven_by == "WanSoundImageToVideo"

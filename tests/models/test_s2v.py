"""S2V against the official module and ComfyUI's, its files, and what refuses a damaged file or input."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import wan_core
from tests.animate_references import DATA, draw_weights
from tests.s2v_references import GRIDS, MOTION, S2V, draw_inputs, steady
from wan_core.checkpoint import CheckpointError
from wan_core.checkpoint.detect import detect, expected_shapes
from wan_core.models.wan.families.s2v.data import S2V_14B, extra_tokens
from wan_core.models.wan.families.s2v.model import S2VModel, groups
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs, Place

ENCODER = "casual_audio_encoder.encoder.final_linear"
INPUTS = ("audio", "reference", "motion", "pose")


def run(model: WanModel, given: dict[str, torch.Tensor], **changed) -> torch.Tensor:
    inputs = given | changed
    with torch.no_grad():
        return model(inputs.pop("x"), inputs.pop("timestep"), inputs.pop("context"), **inputs)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return draw_weights(S2V)


@pytest.fixture(scope="module")
def model(weights) -> WanModel:
    return wan_core.load_dit(weights, {"num_heads": S2V.num_heads})


def test_matches_the_official_module(model):
    """Its outputs are kept, with the commit that made them: `tests/s2v_references.py`."""
    assert model.family == "s2v" and model.config == S2V
    with safe_open(DATA / "s2v_official.safetensors", "pt") as kept:
        for grid in GRIDS:
            given = draw_inputs(S2V, grid, motion=MOTION[grid])
            assert distance(run(model, given), kept.get_tensor(str(grid))) <= 1e-5
            silent = torch.zeros_like(given["pose"])
            for pose in (None, silent):
                assert distance(run(model, given, pose=pose), kept.get_tensor(f"{grid} no pose")) <= 1e-5


def test_matches_comfyui(model):
    """With its positions of motion frames, and with one sound in all frames: it has no copies of the first in front.
    Its timesteps are not those of the tokens where a grid has odd rows and columns."""
    with safe_open(DATA / "s2v_comfyui.safetensors", "pt") as kept:
        for grid in GRIDS:
            given = steady(draw_inputs(S2V, grid, motion=MOTION[grid])) | {"comfyui_positions": True}
            found = run(model, given)
            if grid[2] % 2 and grid[3] % 2:
                assert distance(found, kept.get_tensor(str(grid))) > 1e-3
                continue
            assert distance(found, kept.get_tensor(str(grid))) <= 1e-5
            assert distance(run(model, given, audio=None), kept.get_tensor(f"{grid} silent")) <= 1e-5
            alone = run(model, given, reference=None, motion=None)
            assert distance(alone, kept.get_tensor(f"{grid} no reference")) <= 1e-5
            if MOTION[grid] is not None:
                assert distance(run(model, given, comfyui_positions=False), found) > 1e-4


def test_every_input_counts(model):
    given = draw_inputs(S2V, (1, 2, 4, 4))
    whole = run(model, given)
    for name in (*INPUTS, "context"):
        assert distance(run(model, given, **{name: -given[name]}), whole) > 1e-3
    for name in INPUTS:
        assert distance(run(model, given, **{name: None}), whole) > 1e-3


@settings(max_examples=12, deadline=None)
@over(T=st.integers(1, 3), Y=st.integers(4, 9), X=st.integers(4, 9), motion=st.booleans(), reference=st.booleans())
def test_every_grid_has_the_tokens_that_its_configuration_counts(model, T, Y, X, motion, reference):
    given = draw_inputs(S2V, (1, T, Y, X), motion=2 if motion else None)
    if not reference:
        del given["reference"]
    seen: list[BlockInputs] = []

    class Watch:
        name, place = "watch", Place.RESIDUALS

        def __call__(self, inputs, inner):
            seen.append(inputs)
            return inner(inputs)

    with model.runners.adding(Watch()):
        found = run(model, given)
    length = T * Y * X + extra_tokens((T, Y, X), reference=reference, motion=motion)
    assert found.shape == given["x"].shape and torch.isfinite(found).all()
    assert seen[0].tokens.shape[1] == len(seen[0].rope) == length <= S2V.tokens(T, 2 * Y, 2 * X)
    assert length % seen[0].modulation.shape[1] == 0


@over(video=st.integers(1, 400), extra=st.integers(0, 200))
def test_every_token_has_the_modulation_of_its_group(video, extra):
    one, still = torch.randn(2, 1, 6, 3), torch.randn(1, 1, 6, 3)
    rows = groups(one, still, video, video + extra)
    every = rows.repeat_interleave((video + extra) // rows.shape[1], 1)
    expected = torch.cat([one.expand(2, video, 6, 3), still.expand(2, extra, 6, 3)], 1)
    assert torch.equal(every, expected)


def test_prepared_once_is_the_same(model):
    """Prompt and driving inputs are prepared once; branches along the batch see their rows."""
    given = draw_inputs(S2V, (2, 2, 4, 5))
    inputs = {name: given[name] for name in INPUTS}
    with torch.no_grad():
        both = model.prepare_text(given["context"], **inputs)
        for row in range(2):
            here = slice(row, row + 1)
            found = model(given["x"][here], given["timestep"][here], both.rows(row, row + 1))
            expected = run(model, {name: value[here] for name, value in given.items()})
            assert distance(found, expected) <= 1e-5
    with pytest.raises(ValueError, match="beside prepared text"):
        model(given["x"], given["timestep"], both, pose=given["pose"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"audio": torch.zeros(1, 25, 1024, 12)}, "12 frames of audio features given; a video of 2 latent frames"),
        ({"audio": torch.zeros(1, 25, 1024, 7)}, "4 frames for every latent frame"),
        ({"audio": torch.zeros(1, 25, 768, 8)}, r"\[batch, 25, 1024, frames\]"),
        ({"reference": torch.zeros(1, 16, 2, 8, 8)}, "reference latents"),
        ({"motion": torch.zeros(1, 16, 2, 8, 6)}, "motion latents"),
        ({"pose": torch.zeros(1, 16, 1, 8, 8)}, "pose latents"),
        ({"timestep": torch.zeros(1, 2)}, "one timestep for a video"),
        ({"face": torch.zeros(1)}, "face given; a model of the family s2v takes audio, reference, motion, pose"),
    ],
)
def test_wrong_inputs_are_refused(model, changed, message):
    with pytest.raises(ValueError, match=message):
        run(model, draw_inputs(S2V, (1, 2, 4, 4)), **changed)


def test_a_video_too_small_for_motion_frames_is_refused(model):
    with pytest.raises(ValueError, match="at least 64 pixels"):
        run(model, draw_inputs(S2V, (1, 2, 3, 4)))


# ---------------------------------------------------------------------------------------------------------------- files


def test_official_and_comfyui_files_load(weights, tmp_path):
    prefixed = {f"model.diffusion_model.{name}": value for name, value in weights.items()}
    for number, state in enumerate((weights, prefixed)):
        path = tmp_path / f"{number}.safetensors"
        save_file(state, path, {"num_heads": "2"})
        assert detect(path).names.keys() == weights.keys()
        state = wan_core.load_dit(path).state_dict()
        assert state.keys() == weights.keys() and all(torch.equal(state[name], weights[name]) for name in weights)


def test_a_scaled_fp8_file_loads(weights, tmp_path):
    """As ComfyUI's template has it: matrices in FP8 with a scale each, those of the audio branch, too."""
    state: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if value.ndim == 2 and name.endswith("weight") and name.startswith(("blocks.", "audio_injector.", ENCODER)):
            scale = value.abs().max() / 448
            state[name] = (value / scale).to(torch.float8_e4m3fn)
            state[name.removesuffix("weight") + "scale_weight"] = scale.reshape(1)
        else:
            state[name] = value
    state["scaled_fp8"] = torch.zeros(1, dtype=torch.float8_e4m3fn)
    save_file(state, tmp_path / "m.safetensors", {"num_heads": "2"})
    model = wan_core.load_dit(tmp_path / "m.safetensors", dtype=torch.float32)
    found = model.state_dict()
    for name, value in weights.items():
        assert (found[name] - value).abs().max() <= 0.07 * value.abs().max()
    assert torch.isfinite(run(model, draw_inputs(S2V, (1, 2, 4, 4)))).all()


@pytest.mark.parametrize("gone", ["audio_injector.injector.1.norm_q.weight", "frame_packer.proj_2x.bias"])
def test_a_missing_tensor_is_named(weights, gone):
    with pytest.raises(CheckpointError, match=rf"missing \({gone}"):
        wan_core.load_dit({name: value for name, value in weights.items() if name != gone}, {"num_heads": "2"})


def test_injectors_that_fit_no_block_are_refused(weights):
    more = {re.sub(r"(audio_injector\.\w+)\.1\.", r"\1.2.", name): value for name, value in weights.items()}
    with pytest.raises(CheckpointError, match="3 audio injectors do not fit 5 blocks"):
        wan_core.load_dit(weights | more, {"num_heads": "2"})


def test_full_size_parameter_count():
    """16.30 G in 1,260 tensors."""
    shapes = expected_shapes(S2V_14B)
    assert len(shapes) == 1260
    assert round(sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e9, 2) == 16.30


def test_the_class_of_the_module_is_the_family_s(model):
    assert isinstance(model, S2VModel)

"""S2V against the official module and ComfyUI's, its files, and what refuses a damaged file or input."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st
from safetensors import safe_open

import wan_core
from tests.animate_references import DATA, draw_weights
from tests.family_models import distance, load_tiny, run
from tests.s2v_references import GRIDS, MOTION, S2V, draw_inputs, steady
from wan_core.checkpoint import CheckpointError
from wan_core.models.wan.families.s2v import extra_tokens
from wan_core.models.wan.families.s2v.model import groups
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs, Place

ENCODER = "casual_audio_encoder.encoder.final_linear"
INPUTS = ("audio", "reference", "motion", "pose")


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return draw_weights(S2V)


@pytest.fixture(scope="module")
def model() -> WanModel:
    return load_tiny("s2v")


def test_matches_the_official_module(model):
    """Its outputs are kept, with the commit that made them: `tests/s2v_references.py`."""
    assert model.family == "s2v" and model.config == S2V
    with safe_open(DATA / "s2v_official.safetensors", "pt") as references:
        for grid in GRIDS:
            inputs = draw_inputs(S2V, grid, motion=MOTION[grid])
            assert distance(run(model, inputs), references.get_tensor(str(grid))) <= 1e-5
            silent = torch.zeros_like(inputs["pose"])
            for pose in (None, silent):
                assert distance(run(model, inputs, pose=pose), references.get_tensor(f"{grid} no pose")) <= 1e-5


def test_matches_comfyui(model):
    """With its positions of motion frames, and with one sound in all frames: it has no copies of the first in front.
    Its timesteps are not those of the tokens where a grid has odd rows and columns."""
    with safe_open(DATA / "s2v_comfyui.safetensors", "pt") as references:
        for grid in GRIDS:
            inputs = steady(draw_inputs(S2V, grid, motion=MOTION[grid])) | {"comfyui_positions": True}
            output = run(model, inputs)
            if grid[2] % 2 and grid[3] % 2:
                assert distance(output, references.get_tensor(str(grid))) > 1e-3
                continue
            assert distance(output, references.get_tensor(str(grid))) <= 1e-5
            assert distance(run(model, inputs, audio=None), references.get_tensor(f"{grid} silent")) <= 1e-5
            alone = run(model, inputs, reference=None, motion=None)
            assert distance(alone, references.get_tensor(f"{grid} no reference")) <= 1e-5
            if MOTION[grid] is not None:
                assert distance(run(model, inputs, comfyui_positions=False), output) > 1e-4


@settings(max_examples=12, deadline=None)
@over(T=st.integers(1, 3), Y=st.integers(4, 9), X=st.integers(4, 9), motion=st.booleans(), reference=st.booleans())
def test_every_grid_has_the_tokens_that_its_configuration_counts(model, T, Y, X, motion, reference):
    inputs = draw_inputs(S2V, (1, T, Y, X), motion=2 if motion else None)
    if not reference:
        del inputs["reference"]
    seen: list[BlockInputs] = []

    class Watch:
        name, place = "watch", Place.RESIDUALS

        def __call__(self, inputs, inner):
            seen.append(inputs)
            return inner(inputs)

    with model.runners.adding(Watch()):
        output = run(model, inputs)
    length = T * Y * X + extra_tokens((T, Y, X), reference=reference, motion=motion)
    assert output.shape == inputs["x"].shape and torch.isfinite(output).all()
    assert seen[0].tokens.shape[1] == len(seen[0].rope) == length <= S2V.tokens(T, 2 * Y, 2 * X)
    assert length % seen[0].modulation.shape[1] == 0


@over(video=st.integers(1, 400), extra=st.integers(0, 200))
def test_every_token_has_the_modulation_of_its_group(video, extra):
    one, still = torch.randn(2, 1, 6, 3), torch.randn(1, 1, 6, 3)
    rows = groups(one, still, video, video + extra)
    every = rows.repeat_interleave((video + extra) // rows.shape[1], 1)
    expected = torch.cat([one.expand(2, video, 6, 3), still.expand(2, extra, 6, 3)], 1)
    assert torch.equal(every, expected)


# ---------------------------------------------------------------------------------------------------------------- files


def test_injectors_that_fit_no_block_are_refused(weights):
    more = {re.sub(r"(audio_injector\.\w+)\.1\.", r"\1.2.", name): value for name, value in weights.items()}
    with pytest.raises(CheckpointError, match="3 audio injectors do not fit 5 blocks"):
        wan_core.load_dit(weights | more, {"num_heads": "2"})

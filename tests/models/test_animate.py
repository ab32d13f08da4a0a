"""Animate against the official module and diffusers', its layouts, and what refuses a damaged file or input."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanAnimateTransformer3DModel
from safetensors import safe_open

import wan_core
from tests.animate_references import ANIMATE, DATA, OFFICIAL_GRIDS, draw_inputs, draw_weights
from tests.animate_references import TINY_ANIMATE as TINY
from tests.family_models import distance, load_tiny, run
from wan_core.checkpoint import CheckpointError
from wan_core.models.wan.families import FAMILIES
from wan_core.models.wan.families.animate import AnimateConfig, diffusers_names

GRIDS = [(1, 2, 1, 2), (2, 3, 2, 1), (1, 5, 2, 2)]


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return draw_weights(TINY)


def test_matches_the_official_module():
    """Its outputs are kept, with the commit that made them: `tests/animate_references.py`."""
    model = wan_core.load_dit(draw_weights(ANIMATE))
    assert model.family == "animate" and model.config == ANIMATE
    with safe_open(DATA / "animate_official.safetensors", "pt") as references:
        for grid in OFFICIAL_GRIDS:
            assert distance(run(model, draw_inputs(ANIMATE, grid)), references.get_tensor(str(grid))) <= 1e-5


def diffusers_model(config: AnimateConfig) -> WanAnimateTransformer3DModel:
    sizes = {str(config.face_size >> n): channels for n, channels in enumerate(config.motion_channels)}
    torch.manual_seed(0)
    theirs = WanAnimateTransformer3DModel(
        num_attention_heads=config.num_heads, attention_head_dim=config.head_dim, in_channels=36, latent_channels=16,
        text_dim=config.text_dim, freq_dim=config.freq_dim, ffn_dim=config.ffn_dim, num_layers=config.num_layers,
        image_dim=1280, added_kv_proj_dim=config.dim, motion_encoder_channel_sizes=sizes,
        motion_encoder_size=config.face_size, motion_style_dim=config.motion_features,
        motion_dim=config.motion_directions, motion_encoder_dim=config.motion_features,
        face_encoder_hidden_dim=config.face_hidden,
    ).eval()  # fmt: skip
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return theirs


@pytest.mark.parametrize("config", [TINY, AnimateConfig(**{**vars(TINY), "motion_channels": (2, 2, 3, 3, 2, 2, 2, 2)})])
def test_matches_diffusers(config):
    """Loaded from the names and shapes of Diffusers; once with faces of 512 pixels."""
    theirs = diffusers_model(config)
    ours = wan_core.load_dit(theirs.state_dict())
    assert ours.config == config
    for grid in GRIDS if config is TINY else GRIDS[:1]:
        inputs = draw_inputs(config, grid)
        with torch.no_grad():
            expected = theirs(
                inputs["x"], inputs["timestep"], inputs["context"], inputs["image"], inputs["pose"], inputs["face"],
                return_dict=False,
            )[0]  # fmt: skip
        assert distance(run(ours, inputs), expected) <= 1e-5


def test_a_shorter_face_drives_the_first_frames_only():
    """The frames without a face are as the reference frame: attention to a face of zeros, not none."""
    model, inputs = load_tiny("animate"), draw_inputs(TINY, (1, 4, 2, 2))
    short = run(model, inputs, face=inputs["face"][:, :, :5])
    assert distance(short, run(model, inputs)) > 1e-4
    assert distance(short, run(model, inputs, face=inputs["face"][:, :, :1])) > 1e-4
    assert torch.isfinite(short).all()


# -------------------------------------------------------------------------------------------------------------- layouts


def test_diffusers_names_are_all_known():
    theirs = {name: tuple(value.shape) for name, value in diffusers_model(TINY).state_dict().items()}
    joined = FAMILIES["animate"].assembled(theirs)
    parts = {part for one in joined.values() for part in one.parts}
    names = [*(name for name in theirs if name not in parts), *joined]
    renamed = diffusers_names(names)
    assert renamed is not None and set(renamed) == set(names) and len(set(renamed.values())) == len(names)


def test_wrong_shapes_and_strange_tensors_are_named(weights):
    name = "face_encoder.out_proj.weight"
    with pytest.raises(CheckpointError, match=f"wrong shape.*{name}"):
        wan_core.load_dit(weights | {name: weights[name][:-1]})
    with pytest.raises(CheckpointError, match=r"unexpected.*face_adapter\.fuser_blocks\.1"):
        wan_core.load_dit(weights | {"face_adapter.fuser_blocks.1.q_norm.weight": torch.ones(24)})
    with pytest.raises(CheckpointError, match="not those of a transformer of the family wan"):
        wan_core.load_dit({name: value for name, value in weights.items() if "face" in name}, family="wan")

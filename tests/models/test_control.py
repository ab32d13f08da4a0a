"""VACE, Fun control and Fun camera against other programs' modules, their layouts, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanVACETransformer3DModel
from safetensors import safe_open
from safetensors.torch import save_file

import wan_core
from tests.animate_references import DATA, draw_weights
from tests.control_references import CONFIGS, GRIDS, OWN, contexts, draw_inputs
from wan_core.models.wan.families.vace.config import VaceConfig
from wan_core.models.wan.model import WanModel


def made(name: str) -> WanModel:
    return wan_core.load_dit(draw_weights(CONFIGS[name]), {"num_heads": 2})


def run(model: WanModel, given: dict[str, torch.Tensor], **changed) -> torch.Tensor:
    inputs = given | changed
    with torch.no_grad():
        return model(inputs.pop("x"), inputs.pop("timestep"), inputs.pop("context"), **inputs)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# --------------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("name", CONFIGS)
def test_matches_comfyui(name):
    """Its outputs are kept, with the version that made them: `tests/control_references.py`."""
    model, config = made(name), CONFIGS[name]
    assert model.config == config and model.family == config.family == name.partition(" ")[0]
    own = OWN[config.family]
    with safe_open(DATA / "control_comfyui.safetensors", "pt") as kept:
        for grid in GRIDS:
            given = draw_inputs(config, grid)
            assert distance(run(model, given), kept.get_tensor(f"{name} {grid}")) <= 1e-5
            if own != "control":
                assert distance(run(model, given, **{own: None}), kept.get_tensor(f"{name} {grid} none")) <= 1e-5
                continue
            two = {"control": contexts(given[own]), "control_scale": [0.7, 1.6]}
            assert distance(run(model, given, **two), kept.get_tensor(f"{name} {grid} two")) <= 1e-5


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "vace"])
def test_matches_videox_fun(name):
    """The makers' module, of which outputs are kept with the commit that made them."""
    model = made(name)
    with safe_open(DATA / "control_videox-fun.safetensors", "pt") as kept:
        for grid in GRIDS:
            assert distance(run(model, draw_inputs(CONFIGS[name], grid)), kept.get_tensor(f"{name} {grid}")) <= 1e-5


def diffusers_model(layers: int, vace_layers: list[int]) -> WanVACETransformer3DModel:
    torch.manual_seed(0)
    theirs = WanVACETransformer3DModel(
        num_attention_heads=2, attention_head_dim=24, in_channels=16, out_channels=16, text_dim=24, freq_dim=32,
        ffn_dim=64, num_layers=layers, vace_layers=vace_layers, vace_in_channels=96,
    ).eval()  # fmt: skip
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return theirs


@pytest.mark.parametrize(("layers", "vace_layers"), [(2, [0]), (3, [0, 2]), (6, [0, 2, 4]), (2, [0, 1])])
def test_matches_diffusers(layers, vace_layers):
    """Loaded from Diffusers' names; strength 1 and others."""
    theirs = diffusers_model(layers, vace_layers)
    ours = wan_core.load_dit(theirs.state_dict(), {"num_heads": 2})
    assert isinstance(ours.config, VaceConfig) and ours.config.vace_blocks == len(vace_layers)
    for grid in GRIDS if layers == 6 else GRIDS[:1]:
        given = draw_inputs(ours.config, grid)
        for scale in (1.0, 0.0, 0.45, 2.5):
            with torch.no_grad():
                expected = theirs(
                    given["x"], given["timestep"], given["context"], control_hidden_states=given["control"],
                    control_hidden_states_scale=torch.full((len(vace_layers),), scale), return_dict=False,
                )[0]  # fmt: skip
            assert distance(run(ours, given, control_scale=scale), expected) <= 1e-5
            if scale == 1.0:
                assert distance(run(ours, given), expected) <= 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_every_input_counts(name):
    model, given = made(name), draw_inputs(CONFIGS[name], (1, 3, 2, 2))
    whole = run(model, given)
    for key in set(given) - {"x", "timestep"}:
        assert distance(run(model, given, **{key: -given[key]}), whole) > 1e-3, key
    assert distance(run(model, given, **{OWN[CONFIGS[name].family]: None}), whole) > 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_prepared_once_is_the_same(name):
    """Branches along the batch see their rows; one input serves all videos."""
    model, given = made(name), draw_inputs(CONFIGS[name], (2, 3, 2, 2))
    inputs = {key: given[key] for key in set(given) - {"x", "timestep", "context"}}
    with torch.no_grad():
        both = model.prepare_text(given["context"], **inputs)
        for row in range(2):
            here = slice(row, row + 1)
            found = model(given["x"][here], given["timestep"][here], both.rows(row, row + 1))
            assert distance(found, run(model, {key: value[here] for key, value in given.items()})) <= 1e-5
    own = OWN[CONFIGS[name].family]
    one = {own: given[own][:1]}
    twice = {own: given[own][:1].expand(2, *given[own].shape[1:])}
    assert distance(run(model, given, **one), run(model, given, **twice)) <= 1e-5

"""VACE, Fun control and Fun camera against other programs' modules, their layouts, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import WanVACETransformer3DModel
from safetensors import safe_open

import wan_core
from tests.animate_references import DATA, draw_weights
from tests.control_references import CONFIGS, GRIDS, OWN, contexts, draw_inputs
from tests.family_models import distance, load_tiny, run
from wan_core.checkpoint import CheckpointError
from wan_core.checkpoint.lora.names import Finder
from wan_core.config import OptionError
from wan_core.models.wan.families import choose_task
from wan_core.models.wan.families.fun import (
    CAMERA_1_3B,
    CAMERA_14B,
    CAMERA_A14B,
    CONTROL_14B,
    CONTROL_A14B,
)
from wan_core.models.wan.families.task import Clues
from wan_core.models.wan.families.vace import VACE_1_3B, VACE_14B, VaceConfig

# --------------------------------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("name", CONFIGS)
def test_matches_comfyui(name):
    """Its outputs are kept, with the version that made them: `tests/control_references.py`."""
    model, config = load_tiny(name), CONFIGS[name]
    assert model.config == config and model.family == config.family == name.partition(" ")[0]
    own = OWN[config.family]
    with safe_open(DATA / "control_comfyui.safetensors", "pt") as references:
        for grid in GRIDS:
            inputs = draw_inputs(config, grid)
            assert distance(run(model, inputs), references.get_tensor(f"{name} {grid}")) <= 1e-5
            if own != "control":
                assert distance(run(model, inputs, **{own: None}), references.get_tensor(f"{name} {grid} none")) <= 1e-5
                continue
            two = {"control": contexts(inputs[own]), "control_scale": [0.7, 1.6]}
            assert distance(run(model, inputs, **two), references.get_tensor(f"{name} {grid} two")) <= 1e-5


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "vace"])
def test_matches_videox_fun(name):
    """The makers' module, of which outputs are kept with the commit that made them."""
    model = load_tiny(name)
    with safe_open(DATA / "control_videox-fun.safetensors", "pt") as references:
        for grid in GRIDS:
            assert (
                distance(run(model, draw_inputs(CONFIGS[name], grid)), references.get_tensor(f"{name} {grid}")) <= 1e-5
            )


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
        inputs = draw_inputs(ours.config, grid)
        for scale in (1.0, 0.0, 0.45, 2.5):
            with torch.no_grad():
                expected = theirs(
                    inputs["x"], inputs["timestep"], inputs["context"], control_hidden_states=inputs["control"],
                    control_hidden_states_scale=torch.full((len(vace_layers),), scale), return_dict=False,
                )[0]  # fmt: skip
            assert distance(run(ours, inputs, control_scale=scale), expected) <= 1e-5
            if scale == 1.0:
                assert distance(run(ours, inputs), expected) <= 1e-5


# -------------------------------------------------------------------------------------------------------------- layouts


def test_loras_of_either_layout_find_vace_blocks():
    """Those of text-to-video change its blocks, as in ComfyUI, and none of VACE's."""
    finder = Finder(list(draw_weights(CONFIGS["vace"])))
    for file_name, ours in {
        "diffusion_model.vace_blocks.1.self_attn.q": "vace_blocks.1.self_attn.q",
        "transformer.vace_blocks.0.proj_in": "vace_blocks.0.before_proj",
        "transformer.vace_blocks.1.attn2.to_out.0": "vace_blocks.1.cross_attn.o",
        "lora_unet_vace_blocks_1_ffn_0": "vace_blocks.1.ffn.0",
        "diffusion_model.blocks.3.self_attn.q": "blocks.3.self_attn.q",
        "transformer.blocks.1.attn1.to_q": "blocks.1.self_attn.q",
    }.items():
        assert finder.module(file_name) == ours


def test_strange_tensors_and_numbers_of_blocks_are_refused():
    weights = draw_weights(CONFIGS["vace"])
    with pytest.raises(CheckpointError, match=r"unexpected.*vace_blocks\.1\.before_proj"):
        wan_core.load_dit(weights | {"vace_blocks.1.before_proj.weight": torch.zeros(48, 48)}, {"num_heads": 2})
    three = weights | {key.replace("_blocks.1.", "_blocks.2."): weights[key] for key in weights if "_blocks.1." in key}
    with pytest.raises(CheckpointError, match="3 VACE blocks cannot be spread evenly over 4"):
        wan_core.load_dit(three, {"num_heads": 2})
    wide = draw_weights(CONFIGS["fun-control"])
    wide["patch_embedding.weight"] = wide["patch_embedding.weight"][:, :36]
    with pytest.raises(CheckpointError, match="takes 48 or 52 channels"):
        wan_core.load_dit(wide, {"num_heads": 2})


@pytest.mark.parametrize(
    ("config", "name", "alone", "task"),
    [
        (VACE_14B, "wan2.1_vace_14B_fp16", True, "vace-14B"),
        (VACE_14B, "Wan2_2_Fun_VACE_module_A14B_HIGH", True, "vace-A14B"),
        (VACE_14B, "wan2.1_vace_14B_fp16", False, "vace-A14B"),
        (VACE_1_3B, "wan2.1_vace_1.3B", True, "vace-1.3B"),
        (CONTROL_A14B, "m", True, "fun-control-A14B"),
        (CONTROL_14B, "m", True, "fun-control-14B"),
        (CAMERA_A14B, "m", False, "camera-A14B"),
        (CAMERA_1_3B, "m", True, "camera-1.3B"),
    ],
)
def test_tasks_are_recognised(config, name, alone, task):
    choice = choose_task(config, Clues(Path(f"{name}.safetensors"), alone=alone))
    assert choice.task.name == task and choice.task.full_size == config


def test_a_second_expert_of_one_transformer_is_refused():
    with pytest.raises(OptionError, match="leave the second file out"):
        choose_task(CAMERA_14B, Clues(alone=False))
    with pytest.raises(OptionError, match="belongs to no known task"):
        choose_task(replace(CONTROL_A14B, image_dim=1280))

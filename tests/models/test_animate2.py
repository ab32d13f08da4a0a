"""Animate-2 against ComfyUI's and diffusers' modules, its layouts, and what only its own mathematics shows."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import wan_core
from tests.animate_references import ANIMATE2, COMFYUI_GRIDS, DATA, draw_inputs, draw_weights
from wan_core.checkpoint import CheckpointError
from wan_core.checkpoint.detect import detect
from wan_core.config import OptionError
from wan_core.execution.optimize import optimize
from wan_core.models.wan.families.animate2 import attention
from wan_core.models.wan.families.animate2.attention import Driven, DrivenAttention, Recording, spans
from wan_core.models.wan.families.animate2.model import Animate2Model
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.protocol import AttentionCall
from wan_core.ops.attention.registry import resolve_attention
from wan_core.ops.attention.sdpa import SDPA

NAMED = {"config": '{"transformer": {"model_type": "animate2", "num_heads": 2}}'}
GRID = (1, 4, 2, 3)


def run(model: WanModel, given: dict[str, torch.Tensor], **changed) -> torch.Tensor:
    inputs = given | changed
    with torch.no_grad():
        return model(inputs.pop("x"), inputs.pop("timestep"), inputs.pop("context"), **inputs)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return draw_weights(ANIMATE2)


@pytest.fixture(scope="module")
def model(weights) -> WanModel:
    return wan_core.load_dit(weights, metadata=NAMED)


def test_matches_comfyui(model):
    """Its outputs are kept, with the version that made them: `tests/animate_references.py`."""
    assert model.family == "animate2" and model.config == ANIMATE2
    kinds = {"": {}, " defaults": {"pose_image": None, "pose_context": None}, " no pose": {"pose": None}}
    kinds[" strengths"] = {"pose_strength": 0.6, "reference_strength": 1.7}
    with safe_open(DATA / "animate2_comfyui.safetensors", "pt") as kept:
        for grid in COMFYUI_GRIDS:
            for kind, changed in kinds.items():
                found = run(model, draw_inputs(ANIMATE2, grid), **changed)
                assert distance(found, kept.get_tensor(f"{grid}{kind}")) <= 1e-5, (grid, kind)

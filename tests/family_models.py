"""Tiny transformers of the families that take inputs beside the text: weights and inputs from seeds, one forward."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

import wan_core
from tests import animate_references, control_references, s2v_references
from tests.animate_references import ANIMATE2, TINY_ANIMATE, Grid, draw_weights
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel

CONFIGS: dict[str, DiTConfig] = {
    "animate": TINY_ANIMATE,
    "animate2": ANIMATE2,
    "s2v": s2v_references.S2V,
    **control_references.CONFIGS,
}
# Animate-2 has the tensors of image-to-video: metadata tells them apart.
ANIMATE2_METADATA = {"config": '{"transformer": {"model_type": "animate2", "num_heads": 2}}'}


def draw_inputs(config: DiTConfig, grid: Grid, seed: int = 0) -> dict[str, Tensor]:
    """x, timestep, context and the inputs of the family by name."""
    by_family = {
        "animate": animate_references.draw_inputs,
        "animate2": animate_references.draw_inputs,
        "s2v": s2v_references.draw_inputs,
    }
    return by_family.get(config.family, control_references.draw_inputs)(config, grid, seed)  # type: ignore[operator]


@cache
def load_tiny(name: str) -> WanModel:
    """The model of `CONFIGS[name]`, shared by all tests: none changes it."""
    metadata = ANIMATE2_METADATA if name == "animate2" else {"num_heads": 2}
    return wan_core.load_dit(draw_weights(CONFIGS[name]), metadata)


def run(model: WanModel, family_inputs: dict[str, Tensor], **changed: Any) -> Tensor:
    inputs = family_inputs | changed
    with torch.no_grad():
        return model(inputs.pop("x"), inputs.pop("timestep"), inputs.pop("context"), **inputs)


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def same_weights(model: WanModel, weights: dict[str, Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == weights.keys() and all(torch.equal(state[name], weights[name]) for name in weights)

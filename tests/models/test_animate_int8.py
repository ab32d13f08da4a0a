"""Files of Animate and Animate-2 in INT8 with rotated rows, as ComfyUI's templates name them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import wan_core
from tests.animate_references import ANIMATE2, TINY_ANIMATE, draw_inputs, draw_weights
from tests.int8_files import FORMATS, HOLD, described, encoded
from wan_core.checkpoint import CheckpointError
from wan_core.checkpoint.save import write_safetensors
from wan_core.models.wan.families import FAMILIES
from wan_core.models.wan.linears import quantized_names
from wan_core.ops.kernels.integer_weights import decode
from wan_core.ops.quant.packed import PackedLinear

KIND = "rotated 256"
CONFIGS = {
    "animate": replace(TINY_ANIMATE, dim=256, ffn_dim=512, num_heads=2),
    "animate2": replace(ANIMATE2, dim=256, ffn_dim=512, num_heads=2),
}


def stored(family: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a file, and the numbers that they mean."""
    names, state, meant = quantized_names(CONFIGS[family]), {}, {}
    for name, value in draw_weights(CONFIGS[family]).items():
        linear = name.rpartition(".")[0]
        if linear not in names or not name.endswith(".weight"):
            state[name] = meant[name] = value
            continue
        parts = encoded(KIND, value)
        state |= {f"{linear}.{part}": tensor for part, tensor in parts.items()}
        state[f"{linear}.comfy_quant"] = torch.tensor(list(json.dumps(described(KIND)).encode()), dtype=torch.uint8)
        meant[name] = decode(FORMATS[KIND], parts)
    return state, meant


def load(state: dict[str, Tensor], family: str, path: Path, **more: Any) -> Any:
    write_safetensors(state, path, {"num_heads": "2", **FAMILIES[family].metadata})
    return wan_core.load_dit(path, dtype=torch.float32, **more)


@pytest.mark.parametrize("family", CONFIGS)
@torch.no_grad()
def test_they_load_and_multiply_as_they_are(family: str, tmp_path: Path) -> None:
    state, meant = stored(family)
    wide = load(state, family, tmp_path / "m.safetensors")
    found = wide.state_dict()
    assert wide.family == family and all(
        torch.equal(found[name], value) for name, value in meant.items() if name in found
    )
    held = load(state, family, tmp_path / "m.safetensors", quantization=HOLD)
    packed = {name for name, module in held.named_modules() if isinstance(module, PackedLinear)}
    assert packed == quantized_names(CONFIGS[family])
    given = draw_inputs(CONFIGS[family], (1, 3, 4, 6))
    exact = wide(**given)
    assert 0 < (held(**given) - exact).norm() / exact.norm() < 0.03


@pytest.mark.parametrize("family", CONFIGS)
def test_damaged_ones_are_refused(family: str, tmp_path: Path) -> None:
    state, _ = stored(family)
    linear = "blocks.1.self_attn.q"
    for part, value in (
        ("weight_scale", None),
        ("weight", None),
        ("weight_scale", torch.ones(3)),
        ("weight", state[f"{linear}.weight"][:-1]),
        ("comfy_quant", torch.tensor(list(b'{"format": "int3"}'), dtype=torch.uint8)),
    ):
        damaged = {**state, f"{linear}.{part}": value}
        damaged = {name: one for name, one in damaged.items() if one is not None}
        with pytest.raises((CheckpointError, ValueError), match=linear.replace(".", r"\.")):
            load(damaged, family, tmp_path / "m.safetensors")

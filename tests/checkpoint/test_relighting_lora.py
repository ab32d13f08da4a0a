"""The relighting LoRA of Wan2.2-Animate-14B, in the official file's form: PEFT names below `state_dict` in a .ckpt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.animate_references import TINY_ANIMATE
from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.lora.read import read_lora

MODULES = ("self_attn.q", "self_attn.o", "cross_attn.k", "cross_attn.k_img")


@pytest.mark.parametrize(("before", "after"), [("", ""), ("base_model.model.", ""), ("", "default.")])
def test_it_fits_the_blocks(tmp_path: Path, before: str, after: str) -> None:
    dim, wanted = TINY_ANIMATE.dim, []
    state = {}
    for layer in range(TINY_ANIMATE.num_layers):
        for module in MODULES:
            name = f"blocks.{layer}.{module}"
            wanted.append(f"{name}.weight")
            state[f"{before}{name}.lora_A.{after}weight"] = torch.randn(4, dim)
            state[f"{before}{name}.lora_B.{after}weight"] = torch.randn(dim, 4)
    torch.save({"state_dict": state}, tmp_path / "relighting_lora.ckpt")
    found = read_lora(tmp_path / "relighting_lora.ckpt", expected_shapes(TINY_ANIMATE))
    assert sorted(found.changes) == sorted(wanted) and not found.ignored

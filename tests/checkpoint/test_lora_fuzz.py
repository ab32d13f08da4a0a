"""Sound LoRA files of the wrong tensors: a `CheckpointError` that names the file, or changes that fit the model and can
be applied. Damaged files are in test_checkpoint_fuzz.py: one reader opens all."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tools.hostile.lora import LORA_MODEL, base_lora, lora_state
from wan_core.checkpoint import CheckpointError
from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.lora.read import read_lora
from wan_core.checkpoint.save import write_safetensors

CPU = torch.device("cpu")
SHAPES = expected_shapes(LORA_MODEL)
quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def survives(content: bytes) -> str | None:
    """Read it and apply all of it; what the refusal said, or None."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.safetensors"
        path.write_bytes(content)
        try:
            lora = read_lora(path, SHAPES)
        except CheckpointError as fault:
            said = str(fault)
        else:
            apply(lora)
            return None
    assert "damaged.safetensors" in said and len(said) < 3000
    return said


def apply(lora) -> None:
    assert lora.changes and len(lora.words()) < 5000
    for name, changes in lora.changes.items():
        for change in changes:
            assert change.shape == SHAPES[name] and math.isfinite(change.scale)
            assert change.apply(torch.ones(SHAPES[name]), 0.5).shape == SHAPES[name]
            pair = change.low_rank(CPU)
            assert pair is None or (pair[0].shape[0], pair[1].shape[1]) == SHAPES[name]


def test_the_file_is_sound():
    assert survives(base_lora()) is None
    lora = read_lora(lora_state(), SHAPES)
    assert not lora.ignored and len(lora.changes) == 7


@settings(quick, max_examples=26)
@given(st.data())
def test_names_shapes_and_dtypes_mixed_up(data):
    """A sound container of the wrong tensors."""
    state = dict(lora_state())
    for _ in range(data.draw(st.integers(1, 5))):
        name = data.draw(st.sampled_from(sorted(state))) if state else ""
        what = data.draw(st.sampled_from(["drop", "rename", "shape", "dtype", "swap", "value"]))
        if not name:
            break
        if what == "drop":
            del state[name]
        elif what == "rename":
            state[
                data.draw(st.text("ab._01loraupdwnkh", min_size=1, max_size=20)) + name[data.draw(st.integers(0, 30)) :]
            ] = state.pop(name)
        elif what == "shape":
            state[name] = torch.zeros(data.draw(st.lists(st.integers(0, 9), max_size=4)))
        elif what == "dtype":
            state[name] = state[name].to(
                data.draw(st.sampled_from([torch.int64, torch.uint8, torch.bool, torch.float16]))
            )
        elif what == "swap":
            other = data.draw(st.sampled_from(sorted(state)))
            state[name], state[other] = state[other], state[name]
        else:
            state[name] = torch.full_like(
                state[name].float(), data.draw(st.sampled_from([math.nan, math.inf, -1e38, 0.0]))
            )
    if state:
        with tempfile.TemporaryDirectory() as folder:
            write_safetensors(state, Path(folder) / "x", {})
            survives((Path(folder) / "x").read_bytes())


def test_a_product_that_claims_to_be_huge_is_not_made():
    state = {
        "lora_unet_blocks_0_ffn_0.lokr_w1": torch.zeros(1, 1),
        "lora_unet_blocks_0_ffn_0.lokr_w2_a": torch.zeros(2_000_000, 1),
        "lora_unet_blocks_0_ffn_0.lokr_w2_b": torch.zeros(1, 2_000_000),
    }
    with pytest.raises(CheckpointError, match="another shape"):
        read_lora(state, SHAPES)

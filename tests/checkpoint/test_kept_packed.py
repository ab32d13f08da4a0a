"""Weights that stay packed: read in many threads where their file holds them as plain tensors."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from wan_core.checkpoint import load_text_encoder, open_checkpoint, staged
from wan_core.checkpoint.save import write_safetensors
from wan_core.checkpoint.staged import Reading
from wan_core.models.text.umt5 import UMT5Encoder
from wan_core.ops.kernels.formats import FP8, quantize_reference
from wan_core.ops.quant.packed import PackedLinear
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.sources import TINY

PACKED = Quantization(PackedLinear, torch.device("cpu"))


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded text encoder with every linear in FP8 with a scale, as ComfyUI's files of UMT5 have it."""
    encoder = load_text_encoder(TINY / "text_encoder.safetensors")
    path, state = tmp_path_factory.mktemp("scaled") / "scaled.safetensors", {}
    for name, value in encoder.encoder.state_dict().items():
        state[name] = value
        if value.ndim == 2 and "embedding" not in name:
            state[name], state[name.replace(".weight", ".scale_weight")] = quantize_reference(value, "tensor")
    source = open_checkpoint(TINY / "text_encoder.safetensors")
    state["spiece_model"] = source.read("spiece_model")
    write_safetensors(state, path, dict(source.metadata))
    return path


def read(path: Path, how: Reading) -> UMT5Encoder:
    with patch.object(staged, "PIECE", 1000):
        return load_text_encoder(path, dtype=torch.float32, quantization=PACKED, how=how).encoder


def test_it_is_the_same_mapped_and_read(scaled: Path) -> None:
    """Threads read and count every byte: nothing comes from the mapped file, which one thread reads."""
    seen: list[int] = []
    whole = scaled.stat().st_size - open_checkpoint(scaled).tensors["spiece_model"].nbytes
    expected = read(scaled, Reading()).state_dict()
    module = read(scaled, Reading(on_bytes=seen.append, mapped=False))
    fed = module.state_dict()
    assert sum(value.dtype == FP8 for value in fed.values()) > 5 and expected.keys() == fed.keys()
    assert all(torch.equal(value.float(), fed[name].float()) for name, value in expected.items())
    assert 0.9 * whole < sum(seen) <= whole
    mapped = open_checkpoint(scaled)
    linear = module.blocks[0].ffn.fc1
    assert isinstance(linear, PackedLinear)
    name = "blocks.0.ffn.fc1.weight"
    assert torch.equal(linear.weight.view(torch.uint8), mapped.read(name).view(torch.uint8))
    assert linear.weight.untyped_storage().nbytes() < scaled.stat().st_size // 4  # memory of its own, not a view

"""Which attention a file asks ComfyUI for (`X.comfy_attention.config`) is left out of every kind of file. Formats of
quantised matrices that are not known are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.encoder_files import huggingface_names
from wan_core.checkpoint import CheckpointError, load_dit, open_checkpoint, save
from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.load import load_speech, load_vision
from wan_core.checkpoint.lora.read import read_lora
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import write_safetensors
from wan_core.cli import main
from wan_core.cli.inspect import inspect
from wan_core.models.vision.clip import VisionConfig
from wan_core.models.wan.config import DiTConfig

CPU = torch.device("cpu")
SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=128, ffn_dim=128, num_heads=1, num_layers=2, text_dim=48, text_len=32
)


def as_bytes(value: Any) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def plain(seed: int = 1) -> dict[str, Tensor]:
    return random_module(SMALL, device=CPU, dtype=torch.bfloat16, seed=seed).state_dict()


def pair(module: str) -> dict[str, Tensor]:
    return {
        f"{module}.lora_down.weight": torch.randn(2, SMALL.dim),
        f"{module}.lora_up.weight": torch.randn(SMALL.dim, 2),
    }


def test_which_attention_a_file_asks_comfyui_for_is_left_out(tmp_path: Path) -> None:
    """Whatever it says, in a model and a LoRA, and in what is saved of them."""
    for text in (as_bytes({"attention": "comfy_kitchen_int8"}), torch.tensor([0.5, 300.0])):
        preference = {"blocks.0.self_attn.comfy_attention.config": text}
        write_safetensors(plain() | preference, tmp_path / "model.safetensors", {})
        assert inspect(tmp_path / "model.safetensors")["problems"] == []
        save(load_dit(tmp_path / "model.safetensors"), tmp_path / "saved.safetensors")
        assert open_checkpoint(tmp_path / "saved.safetensors").tensors.keys() == plain().keys()
        lora = read_lora(pair("blocks.0.self_attn.q") | preference, expected_shapes(SMALL))
        assert lora.changes.keys() == {"blocks.0.self_attn.q.weight"} and not lora.ignored
        with pytest.raises(CheckpointError, match="it holds no weights, only which attention"):
            open_checkpoint(preference)


# ------------------------------------------------------------------------------------- formats of quantised matrices

ONE = "blocks.0.self_attn.q"
UNKNOWN: dict[str, tuple[dict[str, Tensor], dict[str, str]]] = {
    "awq_w4a16": ({f"{ONE}.comfy_quant": as_bytes({"format": "awq_w4a16"})}, {}),
    "float8_e8m0": ({f"{ONE}.comfy_quant": as_bytes({"format": "float8_e8m0"})}, {}),
    "w6a8": ({}, {"_quantization_metadata": json.dumps({"layers": {ONE: {"format": "w6a8"}}})}),
    "in a format that its description does not name": ({f"{ONE}.comfy_quant": as_bytes({"group": 4})}, {}),
    "comfy_hadamard": ({f"{ONE}.comfy_hadamard": as_bytes({})}, {}),
    "comfy_attention.tau": ({f"{ONE}.comfy_attention.tau": torch.ones(1)}, {}),
    "JSON in at most 4096 bytes": ({f"{ONE}.comfy_quant": torch.ones(9)}, {}),
    "_quantization_metadata": ({}, {"_quantization_metadata": "{"}),
}


def described(what: str, state: Mapping[str, Tensor], folder: Path) -> Path:
    """A file with `state` and what `UNKNOWN` adds to it."""
    more, metadata = UNKNOWN[what]
    write_safetensors({**state, **more}, folder / "file.safetensors", metadata)
    return folder / "file.safetensors"


@pytest.mark.parametrize("what", UNKNOWN)
def test_an_unknown_format_is_refused_in_every_door(what: str, tmp_path: Path) -> None:
    """Also where a reader takes only the tensors that it knows: encoders of pictures and sound, LoRAs."""
    vision = huggingface_names(
        random_module(VisionConfig(dim=160, ffn_dim=32, num_layers=1, tokens=5), device=CPU, dtype=torch.float16)
        .state_dict()
    )  # fmt: skip
    for state, load in (
        (plain(), load_dit),
        (vision, load_vision),
        ({"encoder.layers.0.x": torch.ones(1)}, load_speech),
        (pair(ONE), lambda path: read_lora(path, expected_shapes(SMALL))),
    ):
        path = described(what, state, tmp_path)
        with pytest.raises(CheckpointError, match=what):
            load(path)
        assert what in inspect(path)["problems"][0]
    path = described(what, plain(), tmp_path)
    assert main(["quantize", str(path), str(tmp_path / "out.safetensors")]) == 2

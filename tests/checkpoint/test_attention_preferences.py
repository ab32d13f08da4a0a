"""Which attention a file asks ComfyUI for (`X.comfy_attention.config`): read from every kind of file, shown, and saved
again. Formats of quantised matrices that are not known are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.encoder_files import huggingface_names
from wan_core.checkpoint import CheckpointError, load_dit, open_checkpoint, save
from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.encoders import load_speech, load_vision
from wan_core.checkpoint.lora.read import Lora, read_lora
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import write_safetensors
from wan_core.cli import main
from wan_core.cli.inspect import inspect
from wan_core.config import LoraOptions
from wan_core.models.vision.clip import VisionConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.pipeline.loras import merging, read_loras

CPU = torch.device("cpu")
SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=128, ffn_dim=128, num_heads=1, num_layers=2, text_dim=48, text_len=32
)
INT8 = {"attention": "comfy_kitchen_int8"}
SOL = [{"attention": "comfy_kitchen_sol", "tau": 1.3}, INT8]
MODULES = {"blocks.0.self_attn": INT8, "blocks.1.self_attn": SOL, "blocks.1.cross_attn": {"attention": "a newer one"}}


def as_bytes(value: Any) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def plain(seed: int = 1) -> dict[str, Tensor]:
    return random_module(SMALL, device=CPU, dtype=torch.bfloat16, seed=seed).state_dict()


def preferring(modules: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    return {f"{prefix}{module}.comfy_attention.config": as_bytes(value) for module, value in modules.items()}


def diffusers(name: str) -> str:
    """The Diffusers name of an attention module."""
    return name.replace("self_attn", "attn1").replace("cross_attn", "attn2")


def preferences(path: Path) -> dict[str, Any]:
    return {module: json.loads(text) for module, text in open_checkpoint(path).attention.items()}


def write_sharded(state: Mapping[str, Tensor], folder: Path) -> Path:
    """Two shards with an index; a preference may be in another shard than its module."""
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, listed in shards.items():
        write_safetensors({name: state[name] for name in listed}, folder / file, {})
    table = {name: file for file, listed in shards.items() for name in listed}
    (folder / "model.index.json").write_text(json.dumps({"weight_map": table}))
    return folder / "model.index.json"


def write_single(state: Mapping[str, Tensor], folder: Path) -> Path:
    write_safetensors(state, folder / "model.safetensors", {})
    return folder / "model.safetensors"


@pytest.mark.parametrize(
    ("prefix", "writer"),
    [("", write_single), ("model.diffusion_model.", write_sharded), ("diffusion_model.", write_single)],
)
def test_a_transformer_loads_and_keeps_them(
    prefix: str, writer: Callable[[Mapping[str, Tensor], Path], Path], tmp_path: Path
) -> None:
    weights = plain()
    state = {prefix + name: value for name, value in weights.items()} | preferring(MODULES, prefix)
    model = load_dit(writer(state, tmp_path))
    loaded = model.state_dict()
    assert loaded.keys() == weights.keys() and all(torch.equal(loaded[name], weights[name]) for name in weights)
    save(model, tmp_path / "saved.safetensors")
    assert preferences(tmp_path / "saved.safetensors") == MODULES
    assert load_dit(tmp_path / "saved.safetensors").attention_preferences == model.attention_preferences


def test_a_state_dict_and_diffusers_names() -> None:
    from wan_core.models.wan.families.plain import _ALL_BLOCK, _ALL_TOP

    weights = plain()
    theirs: dict[str, Tensor] = {}
    for name, value in weights.items():
        block = name.split(".", 2) if name.startswith("blocks.") else None
        theirs[_ALL_TOP[name] if block is None else f"blocks.{block[1]}.{_ALL_BLOCK[block[2]]}"] = value
    model = load_dit(theirs | preferring({diffusers(name): value for name, value in MODULES.items()}))
    assert {name: json.loads(text) for name, text in model.attention_preferences.items()} == MODULES


def test_quantize_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_single(plain() | preferring(MODULES), tmp_path)
    for precision in ("int8", "fp8"):
        out = tmp_path / f"{precision}.safetensors"
        assert main(["quantize", str(tmp_path / "model.safetensors"), str(out), "--precision", precision]) == 0
        assert preferences(out) == MODULES
        assert not inspect(out)["problems"]


def pair(module: str) -> dict[str, Tensor]:
    return {
        f"{module}.lora_down.weight": torch.randn(2, SMALL.dim),
        f"{module}.lora_up.weight": torch.randn(SMALL.dim, 2),
    }


SPELLINGS = {
    "diffusion_model.blocks.0.self_attn.q": "diffusion_model.blocks.0.self_attn",
    "blocks.0.self_attn.q": "blocks.0.self_attn",
    "transformer.blocks.0.attn1.to_q": "transformer.blocks.0.attn1",
    "lora_unet_blocks_0_self_attn_q": "lora_unet_blocks_0_self_attn",
}


def read(state: Mapping[str, Tensor], expert: str | None = None) -> Lora:
    return read_lora(state, expected_shapes(SMALL), expert)


@pytest.mark.parametrize(("linear", "module"), SPELLINGS.items())
def test_a_lora_with_them_has_no_problem(linear: str, module: str, tmp_path: Path) -> None:
    state = pair(linear) | preferring({module: SOL})
    lora = read(state)
    assert lora.ignored == {} and {m: json.loads(t) for m, t in lora.attention.items()} == {"blocks.0.self_attn": SOL}
    assert "comfy_kitchen_sol (tau 1.3), else comfy_kitchen_int8 in 1 module; here" in lora.words()
    tiny = {name: torch.zeros(2, 128) if "down" in name else torch.zeros(128, 2) for name in pair(linear)}
    write_safetensors(tiny | preferring({module: SOL}), tmp_path / "lora.safetensors", {})
    report = inspect(tmp_path / "lora.safetensors")
    assert report["problems"] == [] and report["family"] == "for the embedded model"
    assert report["attention"] == ["comfy_kitchen_sol (tau 1.3), else comfy_kitchen_int8 in 1 module"]


def test_a_lora_of_both_experts_and_one_of_another_model() -> None:
    both = pair("transformer.blocks.0.attn1.to_q") | pair("transformer_2.blocks.0.attn1.to_q")
    both |= preferring({"transformer.blocks.0.attn1": INT8, "transformer_2.blocks.0.attn1": SOL})
    for expert, value in (("high", INT8), ("low", SOL)):
        assert {m: json.loads(t) for m, t in read(both, expert).attention.items()} == {"blocks.0.self_attn": value}
    strange = read(pair("blocks.0.self_attn.q") | preferring({"blocks.7.self_attn": INT8}))
    assert list(strange.ignored.values()) == [("blocks.7.self_attn.comfy_attention.config",)]


def test_a_lora_that_is_merged_sets_them(tmp_path: Path) -> None:
    """The preferences of a LoRA take the place of the model's, as in ComfyUI, unless its strength is 0."""
    write_single(plain() | preferring({"blocks.0.self_attn": INT8, "blocks.1.self_attn": INT8}), tmp_path)
    write_safetensors(
        pair("blocks.0.self_attn.q") | preferring({"blocks.1.self_attn": SOL}), tmp_path / "l.safetensors", {}
    )
    for strength, expected in ((0.5, SOL), (0.0, INT8)):
        options = [LoraOptions(path=str(tmp_path / "l.safetensors"), strength=strength)]
        loras = merging(read_loras(options, SMALL, False)["high"], CPU)
        save(load_dit(tmp_path / "model.safetensors", loras=loras), tmp_path / "merged.safetensors")
        assert preferences(tmp_path / "merged.safetensors")["blocks.1.self_attn"] == expected
        assert preferences(tmp_path / "merged.safetensors")["blocks.0.self_attn"] == INT8


BROKEN: dict[str, tuple[Tensor, str]] = {
    "no JSON": (torch.tensor(list(b"{"), dtype=torch.uint8), r'is "\{", and expected is JSON'),
    "no UTF-8": (torch.tensor([34, 255, 34], dtype=torch.uint8), "expected is JSON"),
    "deep": (torch.full((4096,), ord("["), dtype=torch.uint8), "expected is JSON"),
    "no name": (as_bytes({"tau": 1.0}), "expected is JSON"),
    "a name that is no text": (as_bytes({"attention": None}), "expected is JSON"),
    "an empty list": (as_bytes([]), "expected is JSON"),
    "other numbers": (torch.tensor([0.5, 300.0]), "is torch.float32 and holds no bytes"),
    "NaN": (torch.tensor([float("nan")]), "holds no bytes"),
    "large": (torch.full((5000,), 32, dtype=torch.uint8), "has 5000 numbers .* at most 4096 bytes"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_not_understood_is_refused_by_name(what: str, tmp_path: Path) -> None:
    value, reason = BROKEN[what]
    name = "blocks.0.self_attn.comfy_attention.config"
    for state, load in ((plain(), load_dit), (pair("blocks.0.self_attn.q"), read)):
        with pytest.raises(CheckpointError, match=rf"{name}.* {reason}"):
            load({**state, name: value})


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

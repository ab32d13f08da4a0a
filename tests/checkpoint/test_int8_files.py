"""ComfyUI's files with INT8 and 4-bit matrices: read in every spelling, refused where damaged, with LoRAs, written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.int8_files import (
    FORMATS,
    HOLD,
    MICROSCALED,
    NAMES,
    NOTES,
    SMALL,
    described,
    encoded,
    inputs,
    relative,
    run_there,
    stored,
    text_of,
)
from wan_core.checkpoint import CheckpointError, detect, load_dit, load_text_encoder, open_checkpoint
from wan_core.checkpoint.load import read_again
from wan_core.checkpoint.lora.read import read_lora
from wan_core.checkpoint.opened import from_state_dict
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import save, write_safetensors
from wan_core.cli import main
from wan_core.cli.inspect import inspect
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.kernels.integer_weights import encode_int8, rotation_of
from wan_core.ops.quant.fp8 import Fp8RowLinear
from wan_core.ops.quant.int8 import Int8Linear
from wan_core.ops.quant.linear import attach
from wan_core.ops.quant.packed import PackedEmbedding, PackedLinear
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.loras import Wanted, merging
from wan_core.pipeline.settings import PACKED, precision_of
from wan_core.pipeline.sources import TINY, recognise

CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("kind", "spelling", "mixed"),
    [
        *((kind, "tensor", False) for kind in (*FORMATS, *MICROSCALED)),
        *(("w4a8 plain", spelling, False) for spelling in ("params", "metadata")),
        *((kind, *other) for kind in MICROSCALED for other in (("words", True), ("metadata", False))),
    ],
)
@torch.no_grad()
def test_a_file_in_every_format_and_spelling(tmp_path: Path, kind: str, spelling: str, mixed: bool) -> None:
    state, meant, notes = stored(kind, spelling, mixed=mixed)
    path, fmt = tmp_path / "m.safetensors", text_of(kind)
    write_safetensors(state, path, notes)
    assert detect(path).config == SMALL
    wide = load_dit(path, dtype=torch.float32)
    assert all(torch.equal(value, meant[name]) for name, value in wide.state_dict().items())
    packed_model = load_dit(path, dtype=torch.float32, quantization=HOLD)
    packed = {name: m for name, m in packed_model.named_modules() if isinstance(m, PackedLinear)}
    assert packed.keys() == NAMES - {name for name in NAMES if mixed and name.endswith(".k")}
    assert all(m.multiplies == (kind in FORMATS) for m in packed.values())
    assert all(m.packing == ("fp8" if mixed and name.endswith("ffn.0") else fmt) for name, m in packed.items())
    error = relative(packed_model(*inputs()), wide(*inputs()))
    assert 0 < error < 0.02 if kind in FORMATS else error == 0
    encoded_again = load_dit(path, dtype=torch.float32, quantization=Quantization(Fp8RowLinear, CPU))
    weight, expected = (one.get_submodule("blocks.0.ffn.2").weight for one in (encoded_again, wide))
    assert torch.equal(weight.view(torch.uint8), Fp8RowLinear.encode(expected)["weight"].view(torch.uint8))
    part = recognise(path, "dit", load_dit)
    assert part.packed is not None and part.packed.fmt == fmt
    assert precision_of("checkpoint", part, CPU)[0] == PACKED
    if not mixed:
        model = part.load(CPU, torch.bfloat16, HOLD)
        assert part.bytes(torch.bfloat16, HOLD) == sum(p.nbytes for p in model.parameters())
    assert fmt in inspect(path)["precision"] and not inspect(path)["problems"]


def test_products_of_high_precision_where_the_file_wants_them(tmp_path: Path) -> None:
    state, _, notes = stored("rotated 256")
    text = json.dumps(described("rotated 256") | {"full_precision_matrix_mult": True}).encode()
    state |= {f"{name}.comfy_quant": torch.tensor(list(text), dtype=torch.uint8) for name in NAMES}
    write_safetensors(state, tmp_path / "m.safetensors", notes)
    wide = load_dit(tmp_path / "m.safetensors", dtype=torch.float32)
    packed = load_dit(tmp_path / "m.safetensors", dtype=torch.float32, quantization=HOLD)
    with torch.no_grad():
        assert torch.equal(packed(*inputs()), wide(*inputs()))


@pytest.mark.parametrize("kind", ["rotated 256", "tensor", "w4a8"])
def test_encoded_as_int8_again_or_taken_as_it_is(tmp_path: Path, kind: str) -> None:
    state, meant, notes = stored(kind)
    write_safetensors(state, tmp_path / "m.safetensors", notes)
    model = load_dit(tmp_path / "m.safetensors", dtype=torch.float32, quantization=Quantization(Int8Linear, CPU))
    linear = model.get_submodule("blocks.0.ffn.2")
    wanted = encode_int8(meant["blocks.0.ffn.2.weight"], 256)
    if kind == "rotated 256":
        wanted = {name: state[f"blocks.0.ffn.2.{name}"] for name in wanted}
    assert torch.equal(linear.weight, wanted["weight"]) and torch.equal(linear.weight_scale, wanted["weight_scale"])


def test_a_text_encoder_in_int8(tmp_path: Path) -> None:
    encoder = load_text_encoder(TINY / "text_encoder.safetensors", dtype=torch.float32)
    state: dict[str, Tensor] = {}
    rotation = rotation_of(encoder.encoder.config.dim)
    linears = {name for name, m in encoder.encoder.named_modules() if isinstance(m, torch.nn.Linear)}
    for name, value in encoder.encoder.state_dict().items():
        module = name.rpartition(".")[0]
        if module in linears or name == "token_embedding.weight":
            size = rotation_of(value.shape[1])
            state |= {f"{module}.{part}": t for part, t in encode_int8(value, size).items()}
            text = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": size}
            state[f"{module}.comfy_quant"] = torch.tensor(list(json.dumps(text).encode()), dtype=torch.uint8)
        else:
            state[name] = value
    state["spiece_model"] = torch.frombuffer(bytearray(encoder.tokenizer.proto), dtype=torch.uint8)
    path = tmp_path / "umt5.safetensors"
    write_safetensors(state, path, {})
    assert rotation
    wide = load_text_encoder(path, dtype=torch.float32)
    packed = recognise(path, "text_encoder", load_text_encoder).load(CPU, torch.float32, HOLD)
    assert {n for n, m in packed.encoder.named_modules() if isinstance(m, PackedLinear)} == linears
    ids = torch.tensor([[3, 0], [7, 3]])
    assert torch.equal(packed.encoder.token_embedding(ids), wide.encoder.token_embedding(ids))
    assert isinstance(packed.encoder.token_embedding, PackedEmbedding)
    prompts = ["a red circle moving right"]
    exact = encoder.encode(prompts)
    assert (
        relative(packed.encode(prompts), wide.encode(prompts)) < 0.03 and relative(packed.encode(prompts), exact) < 0.05
    )


ONE = "blocks.1.ffn.0"


def damaged(kind: str, change: dict[str, Any] | None = None, **parts: Tensor | None) -> dict[str, Tensor]:
    """A file's tensors with another description of one matrix, and other parts (None: without it)."""
    state, _, _ = stored(kind)
    if change is not None:
        text = json.dumps(described(kind) | change).encode()
        state[f"{ONE}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    state |= {f"{ONE}.{name}": part for name, part in parts.items() if part is not None}
    return {name: t for name, t in state.items() if parts.get(name.removeprefix(f"{ONE}."), 0) is not None}


@pytest.mark.parametrize(
    ("kind", "change", "parts", "message"),
    [
        ("rows", None, {"weight_scale": None}, "weight_scale is missing"),
        ("rows", None, {"weight_scale": torch.ones(3)}, "do not match"),
        ("rows", None, {"weight_scale": torch.ones(512, 1).int()}, "do not match"),
        ("rows", None, {"weight": torch.zeros(512, 256)}, "do not match"),
        ("rows", None, {"weight": torch.zeros(512, 256, 1).to(torch.int8)}, "do not match"),
        ("rotated 256", {"convrot_groupsize": 128}, {}, "powers of 4"),
        ("rotated 256", {"convrot_groupsize": "256"}, {}, "convrot_groupsize is '256'"),
        ("rotated 256", {"convrot_groupsize": 1024}, {}, "do not match"),
        ("rotated 256", {"convrot_groupsize": -4}, {}, "positive"),
        ("w4a4", {"linear_dtype": "int2"}, {}, "linear_dtype is 'int2'"),
        ("w4a4", None, {"weight_scale": torch.ones(())}, "do not match"),
        ("w4a8", None, {"weight_s_channel": None}, "weight_s_channel is missing"),
        ("w4a8", None, {"weight_codebook": torch.ones(8)}, "do not match"),
        ("w4a8", {"group_size": 24}, {}, "multiples of 16"),
        ("w4a8", {"group_size": 32}, {}, "do not match"),
        ("w4a8", None, {"weight_correction": torch.ones(16, 512)}, "weight_correction"),
        *(
            (kind, None, parts, message)
            for kind in MICROSCALED
            for parts, message in (
                ({"weight_scale": None}, "weight_scale is missing"),
                ({"weight_scale": torch.zeros(128, 4, dtype=torch.uint8)}, "do not match"),
                ({"weight": torch.zeros(512, 256)}, "parts"),
                ({"weight_scale_3": torch.ones(()), "weight_scale_inv": torch.ones(())}, "quantised"),
            )
        ),
    ],
)
def test_damage_is_said(
    tmp_path: Path, kind: str, change: dict[str, Any] | None, parts: dict[str, Tensor | None], message: str
) -> None:
    write_safetensors(damaged(kind, change, **parts), tmp_path / "bad.safetensors", NOTES)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_dit(tmp_path / "bad.safetensors")
    assert "bad.safetensors" in str(caught.value)
    assert inspect(tmp_path / "bad.safetensors")["problems"]


# ---------------------------------------------------------------------------------------------------------------- LoRAs


@pytest.fixture
def lora(tmp_path: Path) -> Wanted:
    generator = torch.Generator().manual_seed(7)
    state = {}
    for name in sorted(NAMES):
        n, k = (512 if name.endswith("ffn.0") else 256), (512 if name.endswith("ffn.2") else 256)
        state[f"diffusion_model.{name}.lora_up.weight"] = torch.randn(n, 4, generator=generator) * 0.1
        state[f"diffusion_model.{name}.lora_down.weight"] = torch.randn(4, k, generator=generator) * 0.1
    shapes = {
        name: tuple(t.shape) for name, t in random_module(SMALL, device=CPU, dtype=torch.bfloat16).named_parameters()
    }
    return Wanted(read_lora(from_state_dict(state, "a LoRA"), shapes), 1.0, ("", 0, 0))


@torch.no_grad()
def test_merged_into_int8_it_is_int8_again(tmp_path: Path, lora: Wanted) -> None:
    """In the rotated basis, rounded once; and close to the sum in full precision."""
    state, _, notes = stored("rotated 64")
    write_safetensors(state, tmp_path / "m.safetensors", notes)
    merged = load_dit(tmp_path / "m.safetensors", dtype=torch.float32, quantization=HOLD, loras=merging([lora], CPU))
    dense = load_dit(tmp_path / "m.safetensors", dtype=torch.float32, loras=merging([lora], CPU))
    linear = merged.get_submodule("blocks.0.ffn.2")
    wanted = encode_int8(dense.get_parameter("blocks.0.ffn.2.weight"), 256)
    assert isinstance(linear, Int8Linear) and torch.equal(linear.weight, wanted["weight"])
    plain = load_dit(tmp_path / "m.safetensors", dtype=torch.float32, quantization=HOLD)
    expected = dense(*inputs())
    assert relative(merged(*inputs()), expected) < 0.03 < relative(plain(*inputs()), expected)


@pytest.mark.parametrize("kind", [Fp8RowLinear, Int8Linear])
@torch.no_grad()
def test_put_on_and_taken_off_a_loaded_model(tmp_path: Path, lora: Wanted, kind: type[Int8Linear]) -> None:
    """The bits of loading with it, and without."""
    state, _, notes = stored("rotated 256")
    path, quantization = tmp_path / "m.safetensors", Quantization(kind, CPU, as_stored=kind is Fp8RowLinear)
    write_safetensors(state, path, notes)
    model, changes = load_dit(path, dtype=torch.float32, quantization=quantization), merging([lora], CPU)
    for loras in (changes, None):
        expected = load_dit(path, dtype=torch.float32, quantization=quantization, loras=loras)
        names = [f"{name}.weight" for name in NAMES]
        read_again(model, path, names, device=CPU, dtype=torch.float32, quantization=quantization, loras=loras)
        assert all(torch.equal(p.float(), expected.get_parameter(n).float()) for n, p in model.named_parameters())


@torch.no_grad()
def test_attached_beside_a_rotated_linear() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 512, generator=generator), torch.randn(2, 9, 512, generator=generator)
    up, down = torch.randn(48, 4, generator=generator), torch.randn(4, 512, generator=generator)
    linear = Int8Linear(512, 48, bias=False, dtype=torch.float32)
    linear.load(Int8Linear.encode(weight))
    before = linear(x)
    attach(linear, [(up, down)], torch.full((4,), 0.5), torch.float32)
    added = 0.5 * x @ down.t() @ up.t()
    assert relative(linear(x) - before, added) < 0.05
    assert relative(linear.decode(linear.weight, linear.weight_scale), weight) < 0.03


# -------------------------------------------------------------------------------------------------------- real ComfyUI


NATIVE = """
import sys
given, out, *files = sys.argv[1:]
sys.argv = [sys.argv[0], "--cpu"]
import torch, comfy_kitchen
import comfy.options; comfy.options.enable_args_parsing()
import comfy.sd, comfy.utils
from safetensors.torch import load_file, save_file
given, found = load_file(given), {}
for n, path in enumerate(files):
    state, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    patcher = comfy.sd.load_diffusion_model_state_dict(state, metadata=metadata)
    model = patcher.model.diffusion_model
    assert sum(type(p).__name__ == "QuantizedTensor" for p in model.parameters()) in (0, 10), "not all were read"
    with torch.no_grad():
        found[str(n)] = model(given["x"], given["t"], given["text"]).float().contiguous()
save_file(found, out)
"""


@pytest.mark.comfy
@torch.no_grad()
def test_comfyui_gives_the_same_and_loads_what_quantize_writes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """One block: a number that falls to the other side of a rounding step, by a difference of 1e-7, moves the next
    block's input by 1e-4 and then a hundredth of its numbers to other steps."""
    config = DiTConfig(in_channels=16, out_channels=16, dim=256, ffn_dim=512, num_heads=2, num_layers=1)
    model = random_module(config, device=CPU, dtype=torch.bfloat16, seed=1)
    files = {"bf16": tmp_path / "bf16.safetensors"}
    save(model, files["bf16"])
    for kind in ("tensor", "rows", "rotated 64", "rotated 256", "w4a8"):
        state: dict[str, Tensor] = {}
        for name, value in model.state_dict().items():
            linear = name.rpartition(".")[0]
            if linear not in config.quantized_names() or not name.endswith(".weight"):
                state[name] = value
                continue
            state |= {f"{linear}.{part}": t for part, t in encoded(kind, value).items()}
            text = torch.tensor(list(json.dumps(described(kind)).encode()), dtype=torch.uint8)
            state[f"{linear}.comfy_quant"] = text
        files[kind] = tmp_path / f"{kind}.safetensors"
        write_safetensors(state, files[kind], {})
    for precision in ("int8", "fp8"):
        files[precision] = tmp_path / f"q{precision}.safetensors"
        arguments = ["quantize", str(files["bf16"]), str(files[precision]), "--precision", precision]
        assert main([*arguments, "--device", "cpu"]) == 0
    x, t, text = inputs(config)
    write_safetensors({"x": x, "t": t, "text": text}, tmp_path / "in", {})
    run_there(NATIVE, tmp_path / "in", tmp_path / "out", *files.values())
    out = open_checkpoint(tmp_path / "out")
    exact = load_dit(files["bf16"], dtype=torch.float32)(x, t, text)
    errors = {}
    for n, (name, path) in enumerate(files.items()):
        theirs, quantization = out.read(str(n)), Quantization(Fp8RowLinear if name == "fp8" else PackedLinear, CPU)
        ours = load_dit(path, dtype=torch.float32, quantization=None if name == "bf16" else quantization)(x, t, text)
        errors[name] = relative(theirs, exact)
        assert relative(ours, theirs) < (0.02 if name == "fp8" else 1e-3), name  # ComfyUI scales no FP8 activations
    assert errors["bf16"] < 1e-5 and errors["int8"] == errors["rotated 256"] < 0.006 and errors["fp8"] < 0.02

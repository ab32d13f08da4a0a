"""FP8 checkpoints with scales: both spellings, every granularity, every layout; and saving what was quantised."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wan_core.checkpoint import CheckpointError, load_dit, load_text_encoder, save
from wan_core.checkpoint.layouts import TEXT_BLOCK_MODULES
from wan_core.checkpoint.lora.merge import Change, Merge
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import write_safetensors
from wan_core.cli import main
from wan_core.cli.inspect import inspect
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.kernels.formats import FP8, quantize_reference
from wan_core.ops.quant.fp8 import Fp8BlockLinear, Fp8RowLinear, Fp8TensorLinear, Fp8WeightLinear
from wan_core.ops.quant.packed import PackedLinear
from wan_core.ops.quant.swap import Quantization
from wan_core.ops.quant.transformer_engine import TECurrentLinear
from wan_core.pipeline.settings import holding, precision_of
from wan_core.pipeline.sources import TINY, recognise

CPU = torch.device("cpu")
KINDS = (Fp8RowLinear, Fp8TensorLinear, Fp8BlockLinear, Fp8WeightLinear, TECurrentLinear)
SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=128, ffn_dim=256, num_heads=2, num_layers=2, text_dim=48, text_len=32
)
NAMES = SMALL.quantized_names()


def plain() -> dict[str, Tensor]:
    return random_module(SMALL, device=CPU, dtype=torch.bfloat16, seed=1).state_dict()


def scaled(granularity: str, spelling: str, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the file's tensors, the numbers that they mean)."""
    state, meant = {}, {}
    for name, value in plain().items():
        linear = name.rpartition(".")[0]
        if linear not in NAMES or not name.endswith(".weight"):
            state[prefix + name], meant[name] = value, value.float()
            continue
        if granularity == "block":
            data, scale = Fp8BlockLinear.encode(value).values()
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: data.shape[0], : data.shape[1]]
        else:
            data, scale = quantize_reference(value, "tensor" if granularity in ("number", "one") else "row")
            wide = scale
            shapes = {"number": (), "one": (1,), "channel": (-1,), "column": (-1, 1)}
            scale = scale.reshape(shapes[granularity])
        state[prefix + name], meant[name] = data, data.float() * wide
        state[f"{prefix}{linear}.{spelling}"] = scale
        if spelling == "weight_scale":
            text = json.dumps({"format": "float8_e4m3fn"}).encode()
            state[f"{prefix}{linear}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
        else:
            state[f"{prefix}{linear}.scale_input"] = torch.tensor(1.0)
    if spelling == "scale_weight":
        state["scaled_fp8"] = torch.zeros(2).to(FP8)
    return state, meant


@pytest.mark.parametrize(("spelling", "prefix"), [("scale_weight", ""), ("weight_scale", "model.diffusion_model.")])
@pytest.mark.parametrize("granularity", ["number", "one", "channel", "column", "block"])
def test_loaded_plainly_it_is_weight_times_scale(tmp_path: Path, spelling: str, granularity: str, prefix: str) -> None:
    state, meant = scaled(granularity, spelling, prefix)
    write_safetensors(state, tmp_path / "scaled.safetensors", {})
    loaded = load_dit(tmp_path / "scaled.safetensors", dtype=torch.float32).state_dict()
    assert loaded.keys() == meant.keys() and all(torch.equal(loaded[name], value) for name, value in meant.items())
    half = load_dit(tmp_path / "scaled.safetensors").state_dict()
    assert all(value.dtype != FP8 for value in half.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", ["number", "channel", "block"])
@torch.no_grad()
def test_fp8_linears_take_it_as_it_is(tmp_path: Path, kind: type, granularity: str) -> None:
    """The stored bits where the scales fit the scheme, else encoded anew; the numbers are the same but for that."""
    state, _ = scaled(granularity, "scale_weight")
    write_safetensors(state, tmp_path / "scaled.safetensors", {})
    model = load_dit(tmp_path / "scaled.safetensors", dtype=torch.float32, quantization=Quantization(kind, CPU))
    fits = {"number": kind is not Fp8BlockLinear, "block": kind is Fp8BlockLinear}.get(
        granularity, kind in (Fp8RowLinear, Fp8WeightLinear)
    )
    for name in NAMES:
        linear = model.get_submodule(name)
        assert linear.weight_scale.shape == kind.scale_shape(*linear.weight.shape)
        same = torch.equal(linear.weight.view(torch.uint8), state[f"{name}.weight"].view(torch.uint8))
        assert same or not fits
    exact = load_dit(tmp_path / "scaled.safetensors", dtype=torch.float32)
    x, time, text = torch.randn(1, 16, 2, 8, 8), torch.tensor([500.0]), torch.randn(1, 4, 48)
    output, expected = model(x, time, text), exact(x, time, text)
    assert float((output - expected).norm() / expected.norm()) < 0.08


@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
@pytest.mark.parametrize("kind", [Fp8RowLinear, Fp8TensorLinear, Fp8WeightLinear, TECurrentLinear])
@torch.no_grad()
def test_fp8_of_another_form_is_not_rounded_again(
    tmp_path: Path, kind: type, dtype: torch.dtype, with_scale: bool
) -> None:
    """Casts without scales, and E5M2, are E4M3 but for a power of two; and leave room for a LoRA."""
    scale = torch.tensor(0.037 if with_scale else 1.0)
    state, meant = plain(), {}
    for name in NAMES:
        state[f"{name}.weight"] = data = (state[f"{name}.weight"].float() * 0.3 / scale).to(dtype)
        meant[name] = data.float() * scale
        state |= {f"{name}.scale_weight": scale} if with_scale else {}
    path = tmp_path / "fp8.safetensors"
    write_safetensors(state, path, {})
    model = load_dit(path, dtype=torch.float32, quantization=Quantization(kind, CPU))
    lora = {name: torch.randn(value.shape) * value.norm() / value.numel() ** 0.5 / 30 for name, value in meant.items()}
    merge = Merge({f"{name}.weight": ((difference(value), 1.0),) for name, value in lora.items()}, CPU)
    changed = load_dit(path, dtype=torch.float32, quantization=Quantization(kind, CPU), loras=merge)
    for name, value in meant.items():
        weights = []
        for one in (model, changed):
            linear = one.get_submodule(name)
            weights.append(linear.decode(linear.weight, linear.weight_scale))
        torch.testing.assert_close(weights[0], value, rtol=1e-6, atol=0)
        left = ((weights[1] - value) * lora[name]).sum() / lora[name].square().sum()
        assert abs(left - 1) < 0.1


def difference(value: Tensor) -> Change:
    return Change(kind="difference", shape=tuple(value.shape), factors=(value,))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_quantised_is_saved_and_comes_back(tmp_path: Path, kind: type) -> None:
    quantization = Quantization(kind, CPU)
    model = random_module(SMALL, device=CPU, dtype=torch.bfloat16, seed=2, quantization=quantization)
    save(model, tmp_path / "fp8.safetensors")
    again = load_dit(tmp_path / "fp8.safetensors", dtype=torch.bfloat16, quantization=quantization).state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == again[name].dtype and torch.equal(value.float(), again[name].float())


def refusal(state: dict[str, Tensor], tmp_path: Path) -> str:
    write_safetensors(state, tmp_path / "bad.safetensors", {})
    with pytest.raises(CheckpointError) as fault:
        load_dit(tmp_path / "bad.safetensors")
    return str(fault.value)


def test_damage_is_said(tmp_path: Path) -> None:
    state, _ = scaled("number", "scale_weight")
    one = "blocks.1.ffn.0"
    assert "without a scale" in refusal({n: t for n, t in state.items() if n != f"{one}.scale_weight"}, tmp_path)
    for spelling in ("scale_weight", "weight_scale"):
        every, _ = scaled("number", spelling)
        bare = {n: t for n, t in every.items() if not n.endswith(spelling)}
        assert "without a scale" in refusal(bare, tmp_path), "a marker or a description says that there are some"
    assert "without a weight" in refusal(state | {"blocks.7.ffn.0.scale_weight": torch.ones(())}, tmp_path)
    assert "shape" in refusal(state | {f"{one}.scale_weight": torch.ones(3)}, tmp_path)
    other, _ = scaled("number", "weight_scale")
    unknown = torch.tensor(list(json.dumps({"format": "int5_tensorwise"}).encode()), dtype=torch.uint8)
    assert "quantised" in refusal(other | {f"{one}.comfy_quant": unknown}, tmp_path)
    nested = torch.full((4096,), ord("["), dtype=torch.uint8)  # deeper than a parser goes
    assert "quantised" in refusal(other | {f"{one}.comfy_quant": nested}, tmp_path)
    nvfp4 = torch.tensor(list(json.dumps({"format": "nvfp4"}).encode()), dtype=torch.uint8)
    assert "weight_scale_2 is missing" in refusal(other | {f"{one}.comfy_quant": nvfp4}, tmp_path)
    assert "quantised" in refusal(other | {f"{one}.weight_scale_2": torch.ones(())}, tmp_path)


def test_the_command_writes_what_the_loader_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = TINY / "t2v_high.safetensors", tmp_path / "fp8.safetensors"
    assert main(["quantize", str(source), str(out), "--precision", "fp8", "--device", "cpu"]) == 0
    assert "fp8.safetensors" in capsys.readouterr().out
    wanted = load_dit(source, dtype=torch.bfloat16, quantization=Quantization(Fp8TensorLinear, CPU)).state_dict()
    weights = load_dit(out, dtype=torch.bfloat16, quantization=Quantization(Fp8TensorLinear, CPU)).state_dict()
    assert all(torch.equal(weights[name].float(), value.float()) for name, value in wanted.items())
    assert out.stat().st_size < 0.75 * sum(v.numel() * 2 for v in load_dit(source).state_dict().values())
    assert main(["quantize", str(source), str(out), "--precision", "bf16"]) == 2


@pytest.mark.parametrize("spelling", ["scale_weight", "weight_scale"])
def test_layers_that_are_kept_in_a_higher_precision_stay_so(tmp_path: Path, spelling: str) -> None:
    """Where the checkpoint decides: queries, keys and values together, because they share their input."""
    state, meant = scaled("number", spelling)
    exceptions = ("blocks.0.ffn.2", "blocks.1.self_attn.k", "blocks.1.cross_attn.v")
    for name in exceptions:
        for last in ("scale_weight", "weight_scale", "scale_input", "comfy_quant"):
            state.pop(f"{name}.{last}", None)
        state[f"{name}.weight"] = plain()[f"{name}.weight"]
        meant[f"{name}.weight"] = plain()[f"{name}.weight"].float()
    path = tmp_path / "mixed.safetensors"
    write_safetensors(state, path, {})
    wide = load_dit(path, dtype=torch.float32)
    assert all(torch.equal(value, meant[name]) for name, value in wide.state_dict().items())
    stored = Quantization(Fp8RowLinear, CPU, as_stored=True)
    model = load_dit(path, dtype=torch.float32, quantization=stored)
    as_they_were = {*exceptions, "blocks.1.self_attn.q", "blocks.1.self_attn.v"}
    assert {name for name, m in model.named_modules() if isinstance(m, Fp8RowLinear)} == NAMES - as_they_were
    for name in as_they_were:
        assert torch.equal(model.get_submodule(name).weight, meant[f"{name}.weight"])
    x, time, text = torch.randn(1, 16, 2, 8, 8), torch.tensor([500.0]), torch.randn(1, 4, 48)
    output, expected = model(x, time, text), wide(x, time, text)
    assert float((output - expected).norm() / expected.norm()) < 0.08
    every = load_dit(path, dtype=torch.float32, quantization=Quantization(Fp8RowLinear, CPU))
    assert sum(isinstance(m, Fp8RowLinear) for m in every.modules()) == len(NAMES)
    part = recognise(path, "dit", load_dit)
    assert part.bytes(torch.bfloat16, Quantization(Fp8RowLinear, CPU)) < part.bytes(torch.bfloat16, stored)


def test_e5m2_and_a_description_in_the_notes(tmp_path: Path) -> None:
    """E5M2 is multiplied out, and encoded anew as what the products take; layers may be named in the notes alone."""
    state, meant, layers = {}, {}, {}
    for name, value in plain().items():
        linear = name.rpartition(".")[0]
        state[name], meant[name] = value, value.float()
        if linear in NAMES and name.endswith(".weight"):
            scale = value.float().abs().amax() / 57344
            state[name], state[f"{linear}.weight_scale"] = (value.float() / scale).to(torch.float8_e5m2), scale
            meant[name], layers[linear] = state[name].float() * scale, {"format": "float8_e5m2"}
    notes = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    write_safetensors(state, tmp_path / "e5m2.safetensors", notes)
    wide = load_dit(tmp_path / "e5m2.safetensors", dtype=torch.float32).state_dict()
    assert all(torch.equal(wide[name], value) for name, value in meant.items())
    model = load_dit(tmp_path / "e5m2.safetensors", dtype=torch.bfloat16, quantization=Quantization(Fp8RowLinear, CPU))
    assert model.get_submodule("blocks.0.ffn.0").weight.dtype == FP8


@pytest.mark.parametrize("spelling", ["scale_weight", "weight_scale"])
@torch.no_grad()
def test_the_text_encoder_that_everybody_has(tmp_path: Path, spelling: str) -> None:
    """A file spelled as `umt5_xxl_fp8_e4m3fn_scaled`: Hugging Face's names, matrices in FP8, the table and the norms
    in 16 bits, the tokenizer as a tensor. It can stay as it is in memory."""
    encoder = load_text_encoder(TINY / "text_encoder.safetensors")
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs, _ in TEXT_BLOCK_MODULES}
    state: dict[str, Tensor] = {"spiece_model": torch.frombuffer(bytearray(encoder.tokenizer.proto), dtype=torch.uint8)}
    meant: dict[str, Tensor] = {}
    if spelling == "scale_weight":
        state["scaled_fp8"] = torch.zeros(2).to(FP8)
    for ours, value in encoder.encoder.state_dict().items():
        meant[ours] = value.half().float()
        if not ours.startswith("blocks."):
            theirs = {"token_embedding.weight": "shared.weight", "norm.weight": "encoder.final_layer_norm.weight"}[ours]
            state[theirs] = value.half()
            continue
        _, block, suffix = ours.split(".", 2)
        theirs = f"encoder.block.{block}.{names[suffix]}"
        state[theirs] = value.half()
        if value.ndim == 2 and "pos_embedding" not in ours:
            state[theirs], scale = quantize_reference(value.float(), "tensor")
            state[theirs.replace("weight", spelling) if spelling != "weight_scale" else f"{theirs}_scale"] = scale
            meant[ours] = state[theirs].float() * scale
    path = tmp_path / "umt5.safetensors"
    write_safetensors(state, path, {})
    wide = load_text_encoder(path, dtype=torch.float32)
    assert all(torch.equal(value, meant[name]) for name, value in wide.encoder.state_dict().items())
    part = recognise(path, "text_encoder", load_text_encoder)
    packed = part.load(CPU, torch.float32, Quantization(PackedLinear, CPU))
    linears = [m for m in packed.modules() if isinstance(m, PackedLinear)]
    assert len(linears) == 7 * encoder.encoder.config.num_layers and {m.packing for m in linears} == {"fp8"}
    prompts = ["a red circle moving right", ""]
    assert torch.equal(packed.encode(prompts), wide.encode(prompts))
    parameters = sum(p.nbytes for p in packed.parameters())
    assert abs(part.bytes(torch.float32, Quantization(PackedLinear, CPU)) - parameters) <= 4 * len(linears)
    assert holding(part, None, True, CPU) is not None and holding(part, None, False, CPU) is None


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize(("spelling", "asks"), [("scale_weight", 0), ("scale_weight", 2), ("weight_scale", 1)])
def test_a_file_that_asks_for_products_in_16_bits_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, spelling: str, asks: int
) -> None:
    """Some published experts ask so, by two numbers of `scaled_fp8` or in a matrix's description, and ComfyUI obeys."""
    state, _ = scaled("number", spelling, prefix)
    if spelling == "scale_weight":
        state[f"{prefix}scaled_fp8"] = torch.zeros(asks).to(FP8)
        if prefix:
            del state["scaled_fp8"]
    else:
        last = [name for name in state if name.endswith(".comfy_quant")][-1]
        text = json.dumps({"format": "float8_e4m3fn", "full_precision_matrix_mult": True}).encode()
        state[last] = torch.tensor(list(text), dtype=torch.uint8)
    write_safetensors(state, tmp_path / "scaled.safetensors", {})
    part = recognise(tmp_path / "scaled.safetensors", "dit", load_dit)
    other = replace(part, wide=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cuda = torch.device("cuda")
    for pair in ((part, None), (part, other), (other, part)):
        precision, why = precision_of("checkpoint", pair[0], cuda, pair[1])
        assert (precision, "16 bits" in why) == (("fp8-weights", True) if asks else ("fp8", False))
    assert precision_of("fp8", part, cuda) == ("fp8", "")
    about = inspect(tmp_path / "scaled.safetensors")["scaled"]
    assert ("16 bits" in about) == bool(asks)

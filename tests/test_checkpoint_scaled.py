"""FP8 checkpoints with scales: both spellings, every granularity, every layout; and saving what was quantised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wan_core.checkpoint import CheckpointError, load_dit, load_text_encoder, save
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import write_safetensors
from wan_core.cli import main
from wan_core.config import DiTConfig
from wan_core.kernels.formats import FP8, quantize_reference
from wan_core.models import precision_of
from wan_core.parts import TINY, Part, recognise
from wan_core.quant.fp8 import Fp8BlockLinear, Fp8RowLinear, Fp8TensorLinear, Fp8WeightLinear, encode_blocks
from wan_core.quant.swap import Quantization, quantized_names
from wan_core.quant.transformer_engine import TECurrentLinear

CPU = torch.device("cpu")
KINDS = (Fp8RowLinear, Fp8TensorLinear, Fp8BlockLinear, Fp8WeightLinear, TECurrentLinear)
SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=128, ffn_dim=256, num_heads=2, num_layers=2, text_dim=48, text_len=32
)
NAMES = quantized_names(SMALL)


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
            data, scale = encode_blocks(value).values()
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


@pytest.mark.parametrize("spelling", ["scale_weight", "weight_scale"])
@pytest.mark.parametrize("granularity", ["number", "one", "channel", "column", "block"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
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
    found, expected = model(x, time, text), exact(x, time, text)
    assert float((found - expected).norm() / expected.norm()) < 0.08


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_quantised_is_saved_and_comes_back(tmp_path: Path, kind: type) -> None:
    quantization = Quantization(kind, CPU)
    model = random_module(SMALL, device=CPU, dtype=torch.bfloat16, seed=2, quantization=quantization)
    save(model, tmp_path / "fp8.safetensors")
    again = load_dit(tmp_path / "fp8.safetensors", dtype=torch.bfloat16, quantization=quantization).state_dict()
    for name, value in model.state_dict().items():
        assert value.dtype == again[name].dtype and torch.equal(value.float(), again[name].float())


def test_a_scaled_text_encoder(tmp_path: Path) -> None:
    encoder = load_text_encoder(TINY / "text_encoder.safetensors")
    save(encoder, tmp_path / "plain.safetensors")
    from wan_core.checkpoint import open_checkpoint

    source = open_checkpoint(tmp_path / "plain.safetensors")
    state, meant = {}, {}
    for name in source.tensors:
        value = source.read(name)
        if value.ndim == 2 and ".ffn." in name:
            data, scale = quantize_reference(value, "tensor")
            state |= {name: data, name.replace(".weight", ".scale_weight"): scale}
            meant[name] = data.float() * scale
        else:
            state[name] = value
    assert meant
    write_safetensors(state, tmp_path / "scaled.safetensors", dict(source.metadata))
    loaded = load_text_encoder(tmp_path / "scaled.safetensors", dtype=torch.float32).encoder.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in meant.items())


def refusal(state: dict[str, Tensor], tmp_path: Path) -> str:
    write_safetensors(state, tmp_path / "bad.safetensors", {})
    with pytest.raises(CheckpointError) as fault:
        load_dit(tmp_path / "bad.safetensors")
    return str(fault.value)


def test_damage_is_said(tmp_path: Path) -> None:
    state, _ = scaled("number", "scale_weight")
    one = "blocks.1.ffn.0"
    assert "without a scale" in refusal({n: t for n, t in state.items() if n != f"{one}.scale_weight"}, tmp_path)
    assert "without a weight" in refusal(state | {"blocks.7.ffn.0.scale_weight": torch.ones(())}, tmp_path)
    assert "shape" in refusal(state | {f"{one}.scale_weight": torch.ones(3)}, tmp_path)
    other, _ = scaled("number", "weight_scale")
    text = torch.tensor(list(json.dumps({"format": "nvfp4"}).encode()), dtype=torch.uint8)
    assert "quantised" in refusal(other | {f"{one}.comfy_quant": text}, tmp_path)
    assert "quantised" in refusal(other | {f"{one}.weight_scale_2": torch.ones(())}, tmp_path)


def test_checkpoint_precision_keeps_fp8_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_safetensors(scaled("number", "scale_weight")[0], tmp_path / "scaled.safetensors", {})
    part = recognise(tmp_path / "scaled.safetensors", "dit", load_dit)
    assert isinstance(part, Part) and part.scaled
    assert precision_of("checkpoint", part, CPU) == "checkpoint"
    assert precision_of("bf16", part, torch.device("cuda")) == "bf16"
    for capability, wanted in (((9, 0), "fp8"), ((8, 6), "fp8-weights")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None, c=capability: c)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "a card")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        assert precision_of("checkpoint", part, torch.device("cuda")) == wanted


def test_the_command_writes_what_the_loader_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = TINY / "t2v_high.safetensors", tmp_path / "fp8.safetensors"
    assert main(["quantize", str(source), str(out), "--precision", "fp8", "--device", "cpu"]) == 0
    assert "fp8.safetensors" in capsys.readouterr().out
    wanted = load_dit(source, dtype=torch.bfloat16, quantization=Quantization(Fp8RowLinear, CPU)).state_dict()
    found = load_dit(out, dtype=torch.bfloat16, quantization=Quantization(Fp8RowLinear, CPU)).state_dict()
    assert all(torch.equal(found[name].float(), value.float()) for name, value in wanted.items())
    assert out.stat().st_size < 0.75 * sum(v.numel() * 2 for v in load_dit(source).state_dict().values())
    assert main(["quantize", str(source), str(out), "--precision", "bf16"]) == 2

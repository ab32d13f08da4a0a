"""FP8 linears: what they store, what they compute, where they are put, and what that does to a whole video."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.tensors import relative
from wan_core.checkpoint import load_dit, save
from wan_core.checkpoint.random import random_module
from wan_core.config import LoadOptions, OptionError
from wan_core.execution.optimize import set_attention
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.registry import resolve_attention
from wan_core.ops.kernels.formats import FP8, Quantized, quantize_reference
from wan_core.ops.quant import changed
from wan_core.ops.quant.fp8 import Fp8BlockLinear, Fp8RowLinear, Fp8TensorLinear, Fp8WeightLinear
from wan_core.ops.quant.int8 import Int8Linear
from wan_core.ops.quant.linear import QuantLinear
from wan_core.ops.quant.swap import Quantization, encoded_weight, swap_linears
from wan_core.pipeline.settings import find_quantization
from wan_core.pipeline.sources import find_models

CPU = torch.device("cpu")
KINDS = (Fp8RowLinear, Fp8TensorLinear, Fp8BlockLinear, Fp8WeightLinear)
SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=128, ffn_dim=256, num_heads=2, num_layers=5, text_dim=48, text_len=32
)


def quantized(kind: type[QuantLinear], linear: nn.Linear) -> QuantLinear:
    layer = kind(linear.in_features, linear.out_features, linear.bias is not None, linear.weight.dtype)
    layer.load({**kind.encode(linear.weight), **({} if linear.bias is None else {"bias": linear.bias})})
    return layer


@settings(max_examples=15, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(1, 20).map(lambda i: 16 * i),
    k=st.integers(1, 3).map(lambda i: 128 * i),
    rows=st.integers(1, 7),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_product_is_within_what_three_bits_allow(kind, n, k, rows, bias, seed):
    torch.manual_seed(seed)
    linear, x = nn.Linear(k, n, bias=bias), torch.randn(2, rows, k)
    layer = quantized(kind, linear)
    assert layer.weight.dtype == FP8 and layer.weight_scale.shape == kind.scale_shape(n, k)
    with torch.no_grad():
        exact, out = F.linear(x.double(), linear.weight.double(), None), layer(x).double()
        out = out if linear.bias is None else out - linear.bias.double()
    assert out.shape == exact.shape and relative(out, exact) <= 0.06


@pytest.mark.parametrize("kind", [Fp8RowLinear, Fp8TensorLinear, Fp8BlockLinear])
def test_one_quantisation_serves_several_linears(kind):
    torch.manual_seed(0)
    x = torch.randn(1, 6, 256)
    linears = [quantized(kind, nn.Linear(256, 128)) for _ in range(3)]
    shared = linears[0].quantize(x)
    with torch.no_grad():
        assert all(torch.equal(linear(shared), linear(x)) for linear in linears)


@pytest.mark.parametrize("kind", [Fp8RowLinear, Fp8TensorLinear])
def test_output_of_fp8_attention_goes_in_as_it_is(kind):
    torch.manual_seed(0)
    linear, x = nn.Linear(256, 128), torch.randn(1, 6, 256)
    given_ = quantize_reference(x, "tensor")
    with torch.no_grad():
        exact = F.linear(given_.dequantize(), linear.weight, linear.bias)
        assert kind.takes_fp8 and relative(quantized(kind, linear)(Quantized(*given_)), exact) < 0.04


@pytest.mark.parametrize("kind", [Fp8TensorLinear, Fp8RowLinear, Int8Linear])
def test_a_change_is_the_same_by_parts_of_the_rows(kind, monkeypatch):
    torch.manual_seed(0)
    stored = kind.encode(torch.randn(50, 64))
    total = kind(64, 50, False).decode(*stored.values()) + 0.01 * torch.randn(50, 64)
    whole = kind.change(stored, total)
    monkeypatch.setattr(changed, "ROWS", 16)
    parts = kind.change(stored, total)
    assert not torch.equal(whole["weight"].float(), stored["weight"].float())
    assert all(torch.equal(whole[name].float(), parts[name].float()) for name in whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_widened_weight_is_rounded_once(dtype):
    torch.manual_seed(0)
    layer, x = quantized(Fp8WeightLinear, nn.Linear(128, 64, bias=False)), torch.eye(128, dtype=dtype)
    with torch.no_grad():
        assert torch.equal(layer(x).t(), Quantized(layer.weight, layer.weight_scale).dequantize().to(dtype))


def test_weights_are_widened_for_fp8_weights_alone():
    """Activations are not rounded: only the weight's error is there."""
    torch.manual_seed(0)
    linear, x = nn.Linear(128, 64), torch.randn(4, 128)
    layer = quantized(Fp8WeightLinear, linear)
    weight = Quantized(layer.weight, layer.weight_scale).dequantize()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), F.linear(x, weight, linear.bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_what_is_quantised(keep):
    names = SMALL.quantized_names(keep)
    plain = dict(WanModel(SMALL).named_modules())
    assert all(isinstance(plain[name], nn.Linear) for name in names)
    unquantised = {n for n, m in plain.items() if isinstance(m, nn.Linear)} - names
    inner = {n for n in unquantised if n.startswith("blocks.")}
    assert {n.split(".")[1] for n in inner} == {str(i) for i in (*range(keep), *range(5 - keep, 5))}
    assert {n.split(".")[0] for n in unquantised - inner} == {
        "text_embedding",
        "time_embedding",
        "time_projection",
        "head",
    }


def test_bad_options_say_what_is_possible():
    with pytest.raises(OptionError, match="0 to 2 are possible"):
        SMALL.quantized_names(3)
    with pytest.raises(OptionError, match="quantises nothing"):
        find_quantization("bf16", CPU, keep_blocks=1)
    odd = dataclasses.replace(SMALL, dim=100, ffn_dim=100, num_heads=2)
    for kind, config, says in ((Fp8RowLinear, odd, "multiples of 16"), (Fp8BlockLinear, TOO_NARROW, "multiple of 128")):
        model = random_module(config, device=CPU, dtype=torch.float32)
        with pytest.raises(OptionError, match=says):
            quantize_model(model, kind, config.quantized_names(), torch.float32)


def quantize_model(model, kind, names, dtype):
    """In place, as the loader does it while it reads."""
    values = model.state_dict()
    for name in names:
        weight = encoded_weight(values.pop(f"{name}.weight"), Quantization(kind, CPU))
        values |= {f"{name}.{part}": value for part, value in weight.items()}
    values |= {f"{name}.bias": values[f"{name}.bias"].to(dtype) for name in names}
    swap_linears(model, kind, names, dtype)
    model.load_state_dict(values, assign=True)


TOO_NARROW = dataclasses.replace(SMALL, dim=96, ffn_dim=192)


@pytest.mark.parametrize(("kind", "keep"), [(kind, number % 2) for number, kind in enumerate(KINDS)])
def test_loading_drawing_and_converting_give_the_same_model(tmp_path, kind, keep):
    """Encoded one by one while a file is read, while weights are drawn, or afterwards."""
    quantization = Quantization(kind, CPU, keep)
    plain = random_module(SMALL, device=CPU, dtype=torch.bfloat16, seed=3)
    save(plain, tmp_path / "dit.safetensors")
    loaded = load_dit(tmp_path / "dit.safetensors", dtype=torch.bfloat16, quantization=quantization)
    drawn = random_module(SMALL, device=CPU, dtype=torch.bfloat16, seed=3, quantization=quantization)
    quantize_model(plain, kind, SMALL.quantized_names(quantization.keep_blocks), torch.bfloat16)
    states = [model.state_dict() for model in (loaded, drawn, plain)]
    assert states[0].keys() == states[1].keys() == states[2].keys()
    for name, value in states[0].items():
        assert all(value.dtype == s[name].dtype and torch.equal(value.float(), s[name].float()) for s in states[1:])
    fp8 = {name.removesuffix(".weight") for name, value in states[0].items() if value.dtype == FP8}
    assert fp8 == SMALL.quantized_names(quantization.keep_blocks)
    assert not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("name", ["fp8", "fp8-tensor", "fp8-weights"])
def test_bytes_are_known_before_loading(name):
    """What the plan for memory counts is what the parameters take, scales (a thousandth) aside."""
    options = LoadOptions(model="tiny", precision=name, device="cpu")
    part = find_models(options).of["high"]
    quantization = find_quantization(name, CPU)
    model = part.load(CPU, torch.bfloat16, quantization)
    weights = [p for n, p in model.named_parameters() if not n.endswith("weight_scale")]
    assert part.bytes(torch.bfloat16, quantization) == sum(p.numel() * p.element_size() for p in weights)
    assert part.bytes(torch.bfloat16) > 1.6 * part.bytes(torch.bfloat16, quantization)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_fp8_attention_feeds_every_kind_of_output_projection(kind):
    """Also where norms are kept wider than the matrices, as `load_dit` keeps them without a dtype."""
    model = random_module(SMALL, device=CPU, dtype=torch.bfloat16, seed=1)
    x, context, time = torch.randn(1, 16, 3, 8, 8), torch.randn(1, 9, 48), torch.tensor([700.0])
    with torch.no_grad():
        exact = model(x, time, context)
        for block in model.blocks:
            block.self_attn.norm_q.float(), block.self_attn.norm_k.float()
        if kind is not None:
            quantize_model(model, kind, SMALL.quantized_names(), torch.bfloat16)
        set_attention(model, resolve_attention("math-fp8", CPU, torch.bfloat16)[1])
        assert 0 < relative(model(x, time, context), exact) < 0.2


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from([Fp8TensorLinear, Fp8RowLinear, Int8Linear]),
    size=st.sampled_from([0.003, 0.01, 0.03, 0.1, 1.0, 3.0]),
    shape=st.sampled_from([(48, 512), (1100, 320)]),
    seed=st.integers(0, 99),
)
def test_a_small_change_of_a_weight_in_8_bits_is_not_rounded_away(kind, size, shape, seed):
    """Rounded to the nearest number, of a LoRA a hundredth as large as the weights two fifths would be left in FP8."""
    n, k = shape
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    decode = partial(kind(k, n, False).decode)
    stored = kind.encode(draw(n, k))
    before, half = decode(*stored.values()), slice(n // 2, None)
    change = draw(n, 4) @ draw(4, k)
    change *= size * before.norm() / change.norm()
    change[: n // 2] = 0
    made = kind.change(stored, before + change)
    error = decode(*made.values()) - before - change
    assert abs((error * change).sum() / change.square().sum()) < 0.12  # at most 0.085 in 2,250 matrices
    again = decode(*kind.encode(before + change).values()) - before - change
    assert error[half].norm() <= 2.5 * again[half].norm()  # which hardly changes the weights, where `change` is small
    same = (made["weight_scale"] == stored["weight_scale"]).expand(n, 1)[: n // 2, 0]
    left, were = (each["weight"][: n // 2][same].float() for each in (made, stored))
    assert torch.equal(left, were) and (size >= 0.1 or same.any())  # larger ones may need a larger scale

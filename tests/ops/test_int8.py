"""INT8 and 4-bit weights, rotated or not: their numbers, ComfyUI's files of them, products, and what holds them."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.int8_files import FORMATS, encoded, relative, run_there, stored
from wan_core.checkpoint import load_dit, open_checkpoint
from wan_core.checkpoint.save import write_safetensors
from wan_core.ops.kernels.integer_weights import (
    IntegerFormat,
    as_int8,
    hadamard,
    integer_format,
    is_rotation,
    linear_reference,
    quantize_rows,
    rotate,
    rotation_of,
)
from wan_core.ops.quant import int8
from wan_core.pipeline.settings import PACKED, precision_of
from wan_core.pipeline.sources import recognise

CPU = torch.device("cpu")
REFERENCE = Path(__file__).parent / "data" / "comfy_kitchen_int8.safetensors"


# -------------------------------------------------------------------------------------------------------------- numbers


def test_the_matrix_of_a_rotation() -> None:
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
    assert torch.equal(hadamard(4, CPU, torch.float32), four)
    assert torch.equal(hadamard(16, CPU, torch.float32), torch.kron(four, four))
    assert [n for n in range(1, 1100) if is_rotation(n)] == [4, 16, 64, 256, 1024]
    assert [rotation_of(k) for k in (5120, 13824, 192, 48, 20, 18)] == [256, 256, 64, 16, 4, 0]


@settings(deadline=None, max_examples=15)
@given(size=st.sampled_from([4, 16, 64, 256]), groups=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_a_rotation_is_its_own_inverse_and_keeps_products(size: int, groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(5, size * groups, generator=generator) for _ in range(2))
    torch.testing.assert_close(rotate(rotate(x, size), size), x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotate(x, size) @ rotate(w, size).t(), x @ w.t(), atol=1e-3, rtol=1e-4)


@settings(deadline=None, max_examples=15)
@given(rows=st.integers(1, 20), k=st.sampled_from([4, 64, 512]), seed=st.integers(0, 2**31), size=st.floats(-20, 20))
def test_rows_round_to_the_nearest(rows: int, k: int, seed: int, size: float) -> None:
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed)) * 2.0**size
    x[0] = 0
    data, scale = quantize_rows(x)
    assert ((data.float() * scale - x).abs() <= scale * 0.5001).all()
    assert torch.equal(data[0], torch.zeros(k, dtype=torch.int8))


def test_products_are_exact_sums() -> None:
    """At the largest numbers and longest rows, where float32 sums would round."""
    data = torch.full((8, 16384), 127, dtype=torch.int8)
    data[:, ::2] = 126
    x = data[:3].float()
    expected = data[:3].double() @ data.double().t()
    assert torch.equal(linear_reference(x, data, torch.ones(8), None, 0).double(), expected.float().double())


def test_what_comfy_kitchen_wrote() -> None:
    """Its own tensors of every format, what it dequantised them to, equal but for the order of sums, and products."""
    checkpoint = open_checkpoint(REFERENCE)
    x, bias = checkpoint.read("x"), checkpoint.read("bias")
    formats = {name.split(".")[0] for name in checkpoint.tensors if name.endswith(".weight")}
    assert len(formats) == 9
    for name in sorted(formats):
        packed = checkpoint.read_packed(f"{name}.weight")
        meant = checkpoint.read(f"{name}.meant")
        torch.testing.assert_close(packed.dequantize()[: len(meant)], meant, atol=1e-5, rtol=1e-5)
        if integer_format(packed.fmt).name != "convrot_w4a4":  # its eager products round activations to 4 bits
            out = int8.multiply(x, packed.fmt, packed.parts, bias)
            torch.testing.assert_close(out, checkpoint.read(f"{name}.product"), atol=1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------------------------- hardware


def test_what_it_runs_as_on_each_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The precision that "checkpoint" means for an INT8 file, and the reason."""
    state, _, notes = stored("rotated 256")
    write_safetensors(state, tmp_path / "m.safetensors", notes)
    part, cuda = recognise(tmp_path / "m.safetensors", "dit", load_dit), torch.device("cuda")
    assert precision_of("checkpoint", part, CPU) == (PACKED, "INT8 as stored, in plain torch")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "a card")
    table = {
        ((7, 0), True): (PACKED, "Turing"),
        ((7, 5), True): (PACKED, "by comfy-kitchen"),
        ((8, 6), True): (PACKED, "by comfy-kitchen"),
        ((8, 6), False): (PACKED, "torch multiplies"),
        ((8, 9), True): (PACKED, "by comfy-kitchen"),
        ((8, 9), False): ("fp8", "encoded as FP8"),
        ((9, 0), True): ("fp8", "Hopper"),
        ((12, 0), True): (PACKED, "by comfy-kitchen"),
    }
    for (capability, kitchen), (precision, word) in table.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None, c=capability: c)
        monkeypatch.setattr(
            int8, "_not_installed", lambda k=kitchen: None if k else "needs comfy-kitchen: torch multiplies"
        )
        precision_used, why = precision_of("checkpoint", part, cuda)
        assert precision_used == precision and word in why, (capability, kitchen, precision_used, why)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_calls_of_comfy_kitchen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's functions are replaced by the same arithmetic in float32: what they get fits together."""

    def int8_linear(x, weight, scale, bias, out_dtype, convrot, convrot_groupsize):
        assert out_dtype == x.dtype and x.is_contiguous()
        return linear_reference(x, weight, scale.reshape(-1), bias, convrot_groupsize if convrot else 0)

    def convrot_w4a4_linear(x, weight, scale, bias, groupsize, linear_dtype):
        assert linear_dtype == "int4"
        parts = {"weight": weight, "weight_scale": scale}
        return linear_reference(x, *as_int8(IntegerFormat("convrot_w4a4"), parts), bias, groupsize)

    def w4a8_int8_linear(x, weight, s_rel, s_channel, codebook, bias, group_size, convrot_groupsize, out_dtype):
        parts = {"weight": weight, "weight_s_rel": s_rel, "weight_s_channel": s_channel}
        parts |= {} if codebook is None else {"weight_codebook": codebook}
        data = as_int8(IntegerFormat("asym_w4a8_int8", group=group_size), parts)
        return linear_reference(x, *data, bias, convrot_groupsize)

    kitchen = types.ModuleType("comfy_kitchen")
    for function in (int8_linear, convrot_w4a4_linear, w4a8_int8_linear):
        setattr(kitchen, function.__name__, function)
    monkeypatch.setitem(sys.modules, "comfy_kitchen", kitchen)
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 512, generator=generator), torch.randn(37, 512, generator=generator)
    bias, parts = torch.randn(48, generator=generator), encoded(kind, weight)
    product = int8._kitchen(x, FORMATS[kind], int8._named(*int8._order(parts)), bias)
    assert torch.equal(product, int8.multiply(x, FORMATS[kind].text, parts, bias))
    limit = 0.25 if FORMATS[kind].numbers_in_byte == 2 else 0.03
    assert relative(product, x @ weight.t() + bias) < limit
    assert torch.allclose(
        int8.torch_linear(x, *as_int8(FORMATS[kind], parts), bias, FORMATS[kind].rotation), product, atol=1e-3
    )


# -------------------------------------------------------------------------------------------------------- real ComfyUI


KITCHEN = """
import json, sys, torch
from comfy_kitchen.tensor import AsymW4A8Int8Layout as A8, QuantizedTensor, TensorCoreConvRotW4A4Layout as A4
from comfy_kitchen.tensor import TensorWiseINT8Layout as I8
from safetensors.torch import save_file
torch.manual_seed(0)
weight = torch.randn(8, 256) * torch.exp(torch.randn(1, 256))
state, layers = {"x": torch.randn(6, 256), "bias": torch.randn(8)}, {}
def put(name, layout, said, **how):
    data, params = layout.quantize(weight, **how)
    for key, value in layout.state_dict_tensors(data, params).items():
        state[f"{name}.weight{key}"] = value.contiguous()
    state[f"{name}.meant"] = layout.dequantize(data, params)[:3].contiguous()
    held = QuantizedTensor(data, layout.__name__, params)
    state[f"{name}.product"] = torch.nn.functional.linear(state["x"], held, state["bias"])
    layers[name] = said
rows = {"is_weight": True, "per_channel": True}
put("tensor", I8, {"format": "int8_tensorwise"}, is_weight=True)
put("rows", I8, {"format": "int8_tensorwise"}, **rows)
for n in (4, 16, 64, 256):
    said = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": n}
    put(f"rotated{n}", I8, said, convrot=True, convrot_groupsize=n, **rows)
put("w4a4", A4, {"format": "convrot_w4a4", "params": {"convrot_groupsize": 256}})
put("w4a8", A8, {"format": "asym_w4a8_int8"})
put("w4a8_plain", A8, {"format": "asym_w4a8_int8", "group_size": 32, "convrot_groupsize": 64}, group_size=32,
    convrot_groupsize=64, codebook=False)
save_file(state, sys.argv[1], {"_quantization_metadata": json.dumps({"layers": layers})})
"""


@pytest.mark.comfy
def test_what_this_comfy_kitchen_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_there(KITCHEN, tmp_path / "k.safetensors")
    monkeypatch.setattr(sys.modules[__name__], "REFERENCE", tmp_path / "k.safetensors")
    test_what_comfy_kitchen_wrote()

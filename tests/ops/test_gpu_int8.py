"""INT8 products on an NVIDIA GPU, by comfy-kitchen and by torch, and transformers that hold INT8 and 4-bit weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.int8_files import FORMATS, NOTES, encoded, inputs, relative, stored
from wan_core.checkpoint import load_dit
from wan_core.checkpoint.save import write_safetensors
from wan_core.execution.optimize import compilations, optimize
from wan_core.ops.attention.registry import resolve_attention
from wan_core.ops.kernels.integer_weights import as_int8, decode, linear_reference
from wan_core.ops.quant import int8
from wan_core.ops.quant.int8 import Int8Linear
from wan_core.ops.quant.linear import QuantLinear
from wan_core.ops.quant.packed import PackedLinear
from wan_core.ops.quant.swap import Quantization

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
WAYS = ("comfy-kitchen", "torch")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(int8, "why_not_kitchen", lambda device: "not for this test")
    elif (reason := int8.why_not_kitchen(CUDA)) is not None:
        pytest.skip(reason)
    return request.param


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("rows", "dtype"), [(1, torch.bfloat16), (7, torch.float32), (512, torch.float32), (9000, torch.bfloat16)]
)
@torch.no_grad()
def test_products_equal_the_reference(kind: str, rows: int, dtype: torch.dtype, way: str) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, bias = torch.randn(256, 512, generator=generator), torch.randn(256, generator=generator).to(dtype)
    x, parts = torch.randn(rows, 512, generator=generator).to(dtype), encoded(kind, weight)
    product = int8.multiply(
        x.to(CUDA), FORMATS[kind].text, {name: part.to(CUDA) for name, part in parts.items()}, bias.to(CUDA)
    ).cpu()
    expected = linear_reference(x, *as_int8(FORMATS[kind], parts), bias, FORMATS[kind].rotation)
    assert product.dtype == dtype and product.shape == expected.shape
    if FORMATS[kind].int4 and way == "comfy-kitchen":  # activations in four bits
        assert relative(product, x.float() @ decode(FORMATS[kind], parts).t() + bias) < 0.3
    else:  # of an int8 row, the half of a step that a rounded rotation moves some numbers by
        assert relative(product, expected) < (0.015 if dtype == torch.bfloat16 else 0.006)


@pytest.mark.parametrize("kind", ["rotated 256", "tensor", "w4a8"])
@pytest.mark.parametrize("kind_of_linear", [PackedLinear, Int8Linear])
@torch.no_grad()
def test_transformers_plain_and_compiled(
    tmp_path: Path, kind: str, kind_of_linear: type[QuantLinear], way: str
) -> None:
    torch.compiler.reset()  # the compiler gives a function up after a number of variants
    state, _, _ = stored(kind)
    path = tmp_path / "m.safetensors"
    write_safetensors(state, path, NOTES)
    x, timestep, text = (t.to(CUDA) for t in inputs())
    exact = load_dit(path, dtype=torch.float32)(*inputs())
    attend = resolve_attention("sdpa", CUDA, torch.bfloat16, 128)[1]
    out = {}
    for name, compile in (("plain", "off"), ("compiled", "blocks")):
        model = load_dit(path, device=CUDA, dtype=torch.bfloat16, quantization=Quantization(kind_of_linear, CUDA))
        optimize(model, attend=attend, compile=compile)
        before = compilations()
        prepared = model.prepare_text(text.bfloat16())
        for _ in range(3):
            out[name] = model(x, timestep, prepared).clone()
        assert (compilations() > before) == (compile != "off")
        assert relative(out[name].cpu(), exact) < 0.05
    assert relative(out["compiled"], out["plain"]) < 0.05

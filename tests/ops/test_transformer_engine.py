"""The Transformer Engine linears without the library: storage, delayed scales, padding, and why it cannot run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.tensors import draw, relative
from wan_core.config import LoadOptions, Request
from wan_core.ops.kernels.formats import BLOCK, FP8, Quantized, quantize_reference
from wan_core.ops.quant import transformer_engine as te
from wan_core.ops.quant.fp8 import Fp8BlockLinear, Fp8TensorLinear
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.ops.quant.transformer_engine import (
    DelayedState,
    TEBlockLinear,
    TECurrentLinear,
    TEDelayedLinear,
    padded,
)
from wan_core.pipeline.pipeline import Pipeline

CPU = torch.device("cpu")
KINDS = [TEDelayedLinear, TECurrentLinear, TEBlockLinear]


def linear(kind, k: int = 256, n: int = 128, seed: int = 0):
    layer = kind(k, n)
    layer.load({**kind.encode(draw(n, k, seed=seed)), "bias": draw(n, seed=seed + 1).bfloat16()})
    return layer


def exact(layer, x: Tensor, seed: int = 0) -> Tensor:
    """What a linear of `linear` approximates."""
    weight = draw(layer.out_features, layer.in_features, seed=seed).double()
    return x.double() @ weight.T + layer.bias.double()


# -------------------------------------------------------------------------------------------------------------- storage


def test_weights_of_one_scale_are_those_of_the_native_linear():
    weight = draw(64, 96)
    wanted = quantize_reference(weight, "tensor")
    for kind in (TEDelayedLinear, TECurrentLinear, Fp8TensorLinear):
        values = kind.encode(weight)
        assert torch.equal(values["weight"].float(), wanted.data.float())
        assert values["weight_scale"].shape == kind.scale_shape(64, 96) == (1,)
        assert torch.equal(values["weight_scale"], wanted.scale)


def test_every_block_of_a_weight_has_the_scale_of_its_own_numbers():
    weight = draw(3 * BLOCK, 2 * BLOCK) * torch.logspace(-3, 3, 2 * BLOCK)
    values = TEBlockLinear.encode(weight)
    assert values["weight_scale"].shape == TEBlockLinear.scale_shape(*weight.shape) == (3, 2)
    for i in range(3):
        for j in range(2):
            rows, columns = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
            wanted = quantize_reference(weight[rows, columns], "tensor")
            assert torch.equal(values["weight"][rows, columns].float(), wanted.data.float())
            assert values["weight_scale"][i, j] == wanted.scale
    native = Fp8BlockLinear.encode(weight)
    assert all(torch.equal(native[name].float(), value.float()) for name, value in values.items())


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_fp8_weight_is_stored(kind):
    model = nn.ModuleDict({"a": linear(kind)})
    DelayedState.install(model, CPU)
    assert set(model.state_dict()) == {"a.weight", "a.weight_scale", "a.bias"}
    assert model["a"].weight.dtype == FP8
    assert not list(model.buffers())


@pytest.mark.parametrize("kind", KINDS)
def test_one_quantisation_serves_several_linears_and_any_leading_shape(kind):
    q, v = linear(kind), linear(kind, seed=5)
    DelayedState([q, v], CPU)
    x = draw(2, 9, 256, seed=7).bfloat16()
    shared = q.quantize(x)
    assert shared.data.shape == x.shape
    assert torch.equal(q(shared), q(x))
    assert torch.equal(v(shared), v(x))
    assert q(x).shape == (2, 9, 128)
    row = Quantized(shared.data[:, 3], shared.scale[:, 3] if kind is TEBlockLinear else shared.scale)
    assert torch.equal(q(row), q(x)[:, 3])
    assert relative(q(x), exact(q, x)) < 0.04


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [5, 8])
def test_shapes_on_a_gpu_are_those_of_the_cpu(kind, rows):
    layer = linear(kind)
    DelayedState([layer], CPU)
    x = draw(2, rows, 256).bfloat16()
    on_cpu, out = layer.quantize(x), layer(x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        if layer.slot is not None:
            layer.slot = te.Slot(*(torch.empty(1, device="cuda:0") for _ in range(2)), torch.empty(1, dtype=torch.bool))
        fake = layer.quantize(x.to("cuda:0"))
        data = fake.data.flatten(0, -2)
        product = layer.to("cuda:0").multiply(data, fake.scale)
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in on_cpu]
    assert (product.shape, product.dtype) == (out.flatten(0, -2).shape, out.dtype)


# -------------------------------------------------------------------------------------------------------------- padding


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    multiple=st.sampled_from([1, 4, 8, 16]),
    dim=st.sampled_from([0, 1]),
    dtype=st.sampled_from([FP8, torch.float32, torch.bfloat16]),
)
def test_padding_adds_zeros_and_copies_nothing_that_fits(rows, columns, multiple, dim, dtype):
    t = torch.ones(rows, columns).to(dtype)
    result = padded(t, multiple, dim)
    size = result.shape[dim]
    assert size % multiple == 0
    assert t.shape[dim] <= size < t.shape[dim] + multiple
    assert result.shape[1 - dim] == t.shape[1 - dim]
    assert result.dtype == dtype
    assert torch.equal(result[:rows, :columns].float(), t.float())
    assert result.float().sum() == rows * columns
    assert (result is t) == (size == t.shape[dim])


# --------------------------------------------------------------------------------------------------------- requirements


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a package of that name and source in the library's place: one that does not fit this machine."""

    def forget() -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
            monkeypatch.delitem(sys.modules, name)

    def install(source: str) -> str | None:
        folder = tmp_path / "transformer_engine" / "pytorch"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text("")
        (folder / "__init__.py").write_text(source)
        (folder / "cpp_extensions.py").write_text("def general_gemm(A, B, workspace, out_dtype): ...")
        monkeypatch.syspath_prepend(str(tmp_path))
        forget()
        # another name, because the answer for a library is looked up once
        monkeypatch.setattr(te, "_LIBRARY", replace(te._LIBRARY, name=f"Transformer Engine at {tmp_path}"))
        return te.missing.__wrapped__()

    yield install
    forget()


@pytest.mark.parametrize(
    ("capability", "cuda", "name", "said"),
    [
        ((8, 6), "13.0", "te-current", "8.9"),
        ((8, 0), "13.0", "te-block", "fp8-weights"),
        ((8, 9), "13.0", "te-block", "te-current"),
        ((10, 0), "13.0", "te-block", "te-current"),
        ((9, 0), "12.8", "te-block", "12.8"),
        ((9, 0), None, "te-current", "NVIDIA"),
        ((9, 0), "12.10", "te-block", "the library"),
        ((8, 9), "12.8", "te-delayed", "the library"),
        ((10, 0), "12.8", "te-current", "the library"),
    ],
)
def test_recipes_run_where_their_kernels_do(monkeypatch, capability, cuda, name, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(te, "missing", lambda: "the library")
    assert said in SCHEMES[name].why_not(torch.device("cuda", 0))


@torch.no_grad()
def test_a_run_does_not_depend_on_those_before_it(monkeypatch):
    """Two videos from one pipeline, the second after one of another prompt, are the same video."""
    on_cpu = replace(SCHEMES["te-delayed"], why_not=lambda device: None)  # the recipe's arithmetic on a CPU
    monkeypatch.setitem(SCHEMES, "te-delayed", on_cpu)
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", precision="te-delayed"))
    request = Request(prompt="a red circle moving right", steps=2, width=32, height=32, frames=5)
    first = pipe.generate(request).latents
    pipe.generate(replace(request, prompt="a green square moving up", seed=4))
    assert torch.equal(first, pipe.generate(request).latents)

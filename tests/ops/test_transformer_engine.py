"""The Transformer Engine linears without the library: storage, delayed scales, padding, and why it cannot run."""

from __future__ import annotations

import math
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.tensors import draw, relative
from wan_core.checkpoint.random import random_module
from wan_core.config import LoadOptions, Request
from wan_core.execution.memory.residency import Residency
from wan_core.execution.optimize import DelayedScales, optimize
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.attention.sdpa import SDPA
from wan_core.ops.kernels.formats import BLOCK, FP8, FP8_MAX, Quantized, quantize_reference
from wan_core.ops.quant import transformer_engine as te
from wan_core.ops.quant.fp8 import Fp8BlockLinear, Fp8TensorLinear
from wan_core.ops.quant.swap import Quantization
from wan_core.ops.quant.transformer_engine import (
    HISTORY,
    DelayedState,
    TEBlockLinear,
    TECurrentLinear,
    TEDelayedLinear,
    next_scales,
    padded,
)
from wan_core.pipeline.pipeline import Pipeline

CPU = torch.device("cpu")
KINDS = [TEDelayedLinear, TECurrentLinear, TEBlockLinear]


def linear(kind, k: int = 256, n: int = 128, seed: int = 0):
    made = kind(k, n)
    made.load({**kind.encode(draw(n, k, seed=seed)), "bias": draw(n, seed=seed + 1).bfloat16()})
    return made


def exact(layer, x: Tensor, seed: int = 0) -> Tensor:
    """What a linear of `linear` approximates."""
    weight = draw(layer.out_features, layer.in_features, seed=seed).double()
    return x.double() @ weight.T + layer.bias.double()


class Model(nn.Module):
    """Two delayed linears, one after the other, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = (linear(TEDelayedLinear, 128, 128, seed) for seed in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


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


# ------------------------------------------------------------------------------------------------------- delayed scales

magnitudes = st.one_of(
    st.floats(2.0**-20, 2.0**20, width=32), st.sampled_from([0.0, math.inf, math.nan, 2.0**-140, 3e38])
)


@given(st.lists(st.tuples(magnitudes, magnitudes), min_size=1, max_size=40))
def test_scales_follow_the_largest_of_the_last_forwards_that_measured_something(forwards):
    history, scale = torch.zeros(HISTORY, 2), torch.tensor([7.0, 9.0])
    recent = [deque[float](maxlen=16), deque[float](maxlen=16)]
    for forward in forwards:
        history, scale = next_scales(history, torch.tensor(forward), scale)
        for i, amax in enumerate(forward):
            if math.isfinite(amax) and amax > 0:
                recent[i].append(amax)
            wanted = FP8_MAX / max(recent[i]) if recent[i] else (7.0, 9.0)[i]
            assert scale[i].item() == pytest.approx(min(wanted, torch.finfo(torch.float32).max), rel=1e-6)
    assert scale.isfinite().all()
    assert (scale > 0).all()


@given(st.integers(-18, 18), st.integers(0, 2**16))
def test_first_use_calibrates_on_its_own_input(exponent, seed):
    layer = linear(TEDelayedLinear)
    state = DelayedState([layer], CPU)
    x = draw(24, 256, seed=seed) * 2.0**exponent
    layer.bias.zero_()
    assert relative(layer(x), exact(layer, x)) < 0.04
    slot = state.slots[0]
    assert slot.scale.item() == pytest.approx(FP8_MAX / x.abs().max().item())
    assert slot.scale.item() != 1
    state.update()
    assert slot.scale.item() == pytest.approx(FP8_MAX / x.abs().max().item())
    assert slot.amax.item() == 0


def test_first_input_of_zeros_leaves_a_usable_scale():
    layer = linear(TEDelayedLinear)
    state = DelayedState([layer], CPU)
    assert torch.equal(layer(torch.zeros(4, 256)), layer.bias.expand(4, -1))
    state.update()
    x = draw(4, 256)
    assert relative(layer(x), exact(layer, x)) < 0.04


def test_an_update_after_each_forward_makes_all_scales_once():
    model = Model()
    state = DelayedState.install(model, CPU)
    assert state is not None
    x = draw(16, 128)
    hidden = []
    model.second.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0].abs().max().item()))
    for factor in (1, 4, 2):
        model(x * factor)
        state.update()
    first, second, idle = state.slots
    assert first.scale.item() == pytest.approx(FP8_MAX / (4 * x.abs().max().item()), rel=1e-5)
    assert second.scale.item() == pytest.approx(FP8_MAX / max(hidden), rel=1e-5)
    assert (idle.scale.item(), idle.used.item()) == (0, False)
    assert (state.history > 0).sum(0).tolist() == [3, 3, 0]


def test_two_calls_before_one_update_keep_the_larger():
    layer = linear(TEDelayedLinear)
    state = DelayedState([layer], CPU)
    x = draw(8, 256)
    for factor in (1, 5, 2):
        layer(x * factor)
    state.update()
    assert state.history[0].item() == pytest.approx(5 * x.abs().max().item())


@pytest.mark.parametrize("factor", [3.0, 1000.0, -1e30])
def test_numbers_beyond_the_history_saturate_for_one_forward(factor):
    layer = linear(TEDelayedLinear)
    layer.bias.zero_()
    state = DelayedState([layer], CPU)
    x = draw(32, 256)
    layer(x)
    state.update()
    grown = x * factor
    quantized = layer.quantize(grown)
    assert quantized.data.float().abs().max() == FP8_MAX
    assert quantized.dequantize().abs().max().item() == pytest.approx(x.abs().max().item())
    assert layer(quantized).isfinite().all()
    state.update()
    assert relative(layer(grown), exact(layer, grown)) < 0.04


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_leaves_no_trace(bad):
    layer = linear(TEDelayedLinear)
    state = DelayedState([layer], CPU)
    x = draw(8, 256)
    layer(x)
    state.update()
    before, history = state.slots[0].scale.item(), state.history.clone()
    layer(torch.full_like(x, bad))
    state.update()
    assert state.slots[0].scale.item() == before
    assert torch.equal(state.history, history)
    assert relative(layer(x), exact(layer, x)) < 0.04


def test_the_state_stays_when_the_weights_leave():
    model = Model()
    state = DelayedState.install(model, CPU)
    assert state is not None
    residency = Residency(CPU, "swap")
    residency.add("model", model)
    x = draw(4, 128)
    residency.use("model")(x)
    state.update()
    scales = [slot.scale.item() for slot in state.slots]
    residency.release("model")
    residency.use("model")(x)
    state.update()
    assert [slot.scale.item() for slot in state.slots] == scales
    assert (state.history > 0).sum(0).tolist() == [2, 2, 0]


def test_inference_mode_and_plain_mode_mix():
    model = Model()
    with torch.inference_mode():
        state = DelayedState.install(model, CPU)
        assert state is not None
        model(draw(4, 128))
        state.update()
    model(draw(4, 128))
    state.update()
    assert (state.history > 0).sum(0).tolist() == [2, 2, 0]


@torch.no_grad()
def test_the_runner_updates_the_scales_after_every_forward_and_no_earlier():
    """A transformer with delayed linears: `optimize` installs their state and the runner, once."""
    config = DiTConfig(
        in_channels=16, out_channels=16, dim=96, ffn_dim=128, num_heads=2, num_layers=2, text_dim=48, text_len=12
    )
    model = random_module(config, device=CPU, dtype=torch.float32, quantization=Quantization(TEDelayedLinear, CPU))
    for _ in range(2):  # options may be applied again
        optimize(model, attend=SDPA)
    assert str(model.runners) == "delayed FP8 scales > blocks (resident weights)"
    runner = model.runners.find(DelayedScales)
    assert runner is not None
    updates: list[int] = []
    for block in model.blocks:
        block.ffn[2].register_forward_hook(lambda *_: updates.append(int((runner.state.history > 0).any(1).sum())))
    text = model.prepare_text(draw(1, 9, 48))  # what it measures enters the history with the first forward
    for _ in range(3):
        model(draw(1, 16, 3, 8, 8), torch.tensor([700.0]), text)
    assert updates == [0, 0, 1, 1, 2, 2]
    assert int((runner.state.history > 0).any(1).sum()) == 3


def test_without_a_state_it_says_what_is_missing():
    with pytest.raises(RuntimeError, match=r"DelayedState\.install"):
        linear(TEDelayedLinear)(draw(4, 256))
    assert DelayedState.install(nn.ModuleList([linear(TECurrentLinear)]), CPU) is None


def test_compiled_once_for_all_blocks_and_lengths_and_the_state_moves():
    class Block(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.q, self.o = linear(TEDelayedLinear, 128, 128, seed), linear(TEDelayedLinear, 128, 128, seed + 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.o(self.q(self.q.quantize(x)))

    torch._dynamo.reset()
    blocks = nn.ModuleList(Block(seed) for seed in (0, 10, 20))
    state = DelayedState([m for m in blocks.modules() if isinstance(m, TEDelayedLinear)], CPU)
    compiled = torch.compile(Block.forward, fullgraph=True, dynamic=True, backend="aot_eager")
    inputs = [draw(1, rows, 128, seed=rows) for rows in (40, 56, 72)]
    with torch.no_grad():
        compiled(blocks[0], inputs[0])
        with torch._dynamo.config.patch(error_on_recompile=True):
            for x in inputs:
                for block in blocks:
                    assert relative(compiled(block, x), block(x).double()) < 1e-6
                state.update()
    assert (state.history > 0).sum(0).tolist() == [3] * 6
    assert all(slot.used and slot.scale > 0 for slot in state.slots)


@pytest.mark.parametrize("used", [False, True])
def test_the_op_declares_what_it_changes(used):
    """torch's own checks: schema against behaviour, fake shapes, tracing."""
    slot = te.Slot(torch.ones(1), torch.zeros(1), torch.tensor([used]))
    torch.library.opcheck(te._quantize_delayed, (draw(4, 256), *slot))


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


NAMES = (
    "DType", "Float8BlockQuantizer", "Float8BlockwiseQTensorStorage", "Float8CurrentScalingQuantizer",
    "Float8Quantizer", "Float8TensorStorage",
)  # fmt: skip


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ModuleNotFoundError('No module', name='transformer_engine')", "is not installed"),
        ("raise OSError('undefined symbol: _ZN3c10')", "undefined symbol"),
        ("raise AssertionError('Could not find transformer_engine')", "cannot be imported"),
        ("", "Float8CurrentScalingQuantizer"),
        ("class Float8CurrentScalingQuantizer: ...", "cannot import name 'DType'"),
        ("\n".join(f"class {name}: ..." for name in NAMES), "general_gemm takes no bias, layout"),
    ],
)
def test_a_library_that_does_not_fit_is_a_sentence_with_a_way_out(library, source, said):
    reason = library(source)
    assert said in reason
    assert "pip install --no-build-isolation 'transformer-engine[pytorch]'" in reason


def test_arguments_are_looked_up_by_name():
    class Storage:
        def __new__(cls, data, *, scale): ...

    te.require_arguments(Storage.__new__, "data", "scale")
    with pytest.raises(RuntimeError, match=r"Storage takes no other$"):
        te.require_arguments(Storage.__new__, "data", "other")


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
    assert said in te.why_not(torch.device("cuda", 0), name)


def test_needs_a_gpu():
    assert "NVIDIA" in te.why_not(CPU)


@torch.no_grad()
def test_a_run_does_not_depend_on_those_before_it(monkeypatch):
    """Two videos from one pipeline, the second after one of another prompt, are the same video."""
    monkeypatch.setattr(te, "why_not", lambda device, name: None)  # the recipe's arithmetic on a CPU
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", precision="te-delayed"))
    request = Request(prompt="a red circle moving right", steps=2, width=32, height=32, frames=5)
    first = pipe.generate(request).latents
    pipe.generate(replace(request, prompt="a green square moving up", seed=4))
    assert torch.equal(first, pipe.generate(request).latents)

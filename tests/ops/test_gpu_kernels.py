"""Triton kernels, FP8 products, and compiled blocks on an NVIDIA GPU, against plain torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.tensors import relative
from wan_core.checkpoint.random import random_module
from wan_core.execution.optimize import compilations, optimize, set_attention
from wan_core.models.wan import layers
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.layers import rope_table
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.prepared_text import PreparedText
from wan_core.ops.attention.registry import BACKENDS, resolve_attention
from wan_core.ops.cards import has_fp8
from wan_core.ops.kernels import fused, reference
from wan_core.ops.kernels.formats import FP8, FP8_MAX, quantize_reference
from wan_core.ops.quant.changed import with_change
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.ops.quant.swap import Quantization

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=384, ffn_dim=1280, num_heads=3, num_layers=3, text_dim=64, text_len=32
)
SIZES = ((5, 8, 8), (5, 12, 8), (3, 8, 14), (9, 6, 6), (2, 20, 4), (7, 10, 10))
NATIVE = [name for name in SCHEMES if name.startswith("fp8")]


def runs(name: str) -> bool:
    return torch.cuda.is_available() and SCHEMES[name].why_not(CUDA) is None


@pytest.mark.parametrize("fmt", [None, "row", "block", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "frames", "each", "width"), [(1, 1, 1003, 5120), (2, 1, 77, 3072), (2, 3, 50, 384), (1, 1, 9, 13824)]
)
def test_fused_passes(fmt, dtype, batch, frames, each, width):
    torch.manual_seed(0)
    x, y = (torch.randn(batch, frames * each, width, device=CUDA).to(dtype) for _ in range(2))
    assert fused.runs_kernel(x)
    gate, mul, add = (torch.randn(batch, frames, width, device=CUDA) for _ in range(3))
    allowed = 0.003 if fmt is None else 0.04
    assert relative(fused.norm(x, mul, add, 1e-6, fmt), reference.scaled_norm(x, mul, add, 1e-6)) < allowed
    for g in (None, gate):
        expected = reference.residual(x, y, g)
        total, normed = fused.residual_norm(x.clone(), y.clone(), g, mul, add, 1e-6, fmt)
        assert relative(total, expected) < 0.004
        assert relative(normed, reference.scaled_norm(expected, mul, add, 1e-6)) < allowed + 0.003
        assert relative(fused.residual(x.clone(), y.clone(), g), expected) < 0.004
    assert relative(fused.gelu(x.clone(), fmt), F.gelu(x.double(), approximate="tanh")) < allowed
    if fmt is not None:
        quantized, expected = fused.quantize(x, fmt), quantize_reference(x, fmt)
        assert quantized.scale.shape == expected.scale.shape and relative(quantized.scale, expected.scale) < 1e-5
        assert relative(quantized, expected.dequantize()) < 0.01  # a rounding here and there falls the other way


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "heads"), [(5120, 40), (3072, 24), (128, 2), (96, 3)])
def test_head_norms(dtype, width, heads):
    torch.manual_seed(0)
    D = width // heads
    x, weight = torch.randn(2, 60, width, device=CUDA).to(dtype), torch.randn(width, device=CUDA).to(dtype)
    table = rope_table((3, 4, 5), (D - 4 * (D // 6), 2 * (D // 6), 2 * (D // 6)), CUDA)
    exact = reference.rms_norm(x.double(), weight, 1e-6).unflatten(-1, (heads, -1)).float()
    assert relative(fused.head_norm(x.clone(), weight, heads, 1e-6), exact) < 0.003
    exact = reference.rotate(exact, table)
    assert relative(fused.head_norm(x.clone(), weight, heads, 1e-6, table), exact) < 0.003
    mixed = fused.head_norm_fp8(x.clone(), weight, heads, 1e-6, table)
    assert relative(reference.hadamard_heads(mixed.dequantize()), exact) < 0.04
    centred = exact - exact[:, ::32].mean((0, 1))
    mixed = fused.head_norm_fp8(x.clone(), weight, heads, 1e-6, table, centre=True)
    assert relative(reference.hadamard_heads(mixed.dequantize()), centred) < 0.04


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "dim"), [(40, 128), (3, 64), (2, 16)])
@pytest.mark.parametrize("block", [0, 128])
def test_fp8_of_mixed_heads(dtype, heads, dim, block):
    """Views of one tensor, in both layouts; the kernel runs where Triton is, and gives what plain torch gives."""
    torch.manual_seed(0)
    x = torch.randn(2, 333, 3, heads, dim, device=CUDA, dtype=dtype)[:, :, 1]
    mean, scale = torch.randn(2, 1, heads, dim, device=CUDA), reference.length_scale(x, 2.0)
    assert fused._mixes(x) == (has_fp8(CUDA) and fused.missing_triton() is None)
    for taken in (None, mean):
        mixed = fused.hadamard_fp8(x, scale, taken, block)
        with fused.use("torch"):
            expected = fused.hadamard_fp8(x, scale, taken, block)
        assert mixed.data.shape == expected.data.shape
        assert relative(mixed.data.float(), expected.data.float()) < 0.01  # a rounding falls the other way
        if block:
            assert not mixed.memory[:, :, 333:].float().any()


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("rows", [1, 17, 4095])
def test_products(name, rows):
    if not runs(name):
        pytest.skip(SCHEMES[name].why_not(CUDA))
    torch.manual_seed(0)
    kind, linear = SCHEMES[name].linear, nn.Linear(512, 384, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(1, rows, 512, device=CUDA, dtype=torch.bfloat16)
    quantized = kind(512, 384)
    quantized.load({**kind.encode(linear.weight), "bias": linear.bias})
    with torch.no_grad():
        exact = F.linear(x.double(), linear.weight.double(), linear.bias.double())
        assert relative(quantized(x), exact) < 0.04
        if kind.takes_fp8:
            assert relative(quantized(quantize_reference(x, "tensor")), exact) < 0.045


def case(model: WanModel, size: tuple[int, int, int], batch: int = 1):
    generator = torch.Generator(CUDA).manual_seed(size[0])
    x = torch.randn(batch, 16, *size, generator=generator, device=CUDA)
    context = torch.randn(batch, 9, 64, generator=generator, device=CUDA).bfloat16()
    return x, torch.full((batch,), 900.0, device=CUDA), model.prepare_text(context)


def build(name: str | None, seed: int = 0, **options) -> WanModel:
    quantization = None if name is None else Quantization(SCHEMES[name].linear, CUDA)
    model = random_module(SMALL, device=CUDA, dtype=torch.bfloat16, seed=seed, quantization=quantization)
    attend = resolve_attention(options.pop("attention", "auto"), CUDA, torch.bfloat16, SMALL.head_dim)[1]
    return optimize(model, attend=attend, **options)


@torch.no_grad()
def test_kernels_change_a_forward_no_more_than_rounding():
    model = build(None)
    inputs = case(model, SIZES[0])
    with fused.use("torch"):
        plain = model(*inputs)
    text = PreparedText(tuple((k.float(), v.float()) for k, v in inputs[2].keys_values))
    set_attention(model.float(), resolve_attention("math", CUDA, torch.float32)[1])
    exact = model(inputs[0], inputs[1], text)
    set_attention(model, resolve_attention("auto", CUDA, torch.bfloat16, SMALL.head_dim)[1])
    model.bfloat16()
    assert relative(model(*inputs), exact) < 2 * relative(plain, exact)


@pytest.mark.parametrize("shape", [(5120, 5120), (70, 13824), (13824, 320), (33, 96)])
@pytest.mark.parametrize("size", [0.003, 0.1, 6.0])
def test_a_change_in_fp8(shape, size):
    if not has_fp8(CUDA):
        pytest.skip("the card has no FP8")
    torch.manual_seed(0)
    weight = torch.randn(shape, device=CUDA)
    scale = weight.abs().amax(1, keepdim=True) / FP8_MAX
    data, ratio = (weight / scale).to(FP8), 2.0 ** torch.randint(-1, 1, (shape[0], 1), device=CUDA)
    change = size * torch.randn(shape[0], 8, device=CUDA) @ torch.randn(8, shape[1], device=CUDA)
    work = (data, ratio, data.float() * scale + change, scale / ratio)
    assert fused.writes_fp8(data)
    found = with_change(*work)
    with fused.use("torch"):
        expected = with_change(*work)
    assert relative(found.float(), expected.float()) < 0.002  # a rounding here and there falls the other way
    assert (found.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 0.001
    spoilt = work[2].clone()
    spoilt[3, 5] = torch.nan
    assert with_change(*work[:2], spoilt, work[3]).float().isnan().any(1).nonzero().tolist() == [[3]]


@pytest.mark.parametrize("name", [None, *SCHEMES])
@torch.no_grad()
def test_one_compilation_for_both_experts_and_six_sizes(name):
    if name is not None and not runs(name):
        pytest.skip(SCHEMES[name].why_not(CUDA))
    torch.compiler.reset()
    experts = [build(name, seed) for seed in (0, 1)]
    inputs = [case(experts[0], size) for size in SIZES]
    eager = [[model(*one) for one in inputs] for model in experts]
    before = compilations()
    for model, expected in zip(experts, eager, strict=True):
        optimize(model, attend=model.blocks[0].self_attn.attend, compile="blocks")
        for one, video in zip(inputs, expected, strict=True):
            # delayed scales have moved on since the eager forwards
            assert relative(model(*one), video) < (0.05 if name == "te-delayed" else 0.01)
    # the parts of a block before and after attention; Transformer Engine's blocks are traced once more
    assert compilations() - before == (3 if name == "te-block" else 2)


@torch.no_grad()
def test_fp8_attention_hands_fp8_to_the_output_projection():
    reason = BACKENDS["cudnn-fp8"].why_not(CUDA, torch.bfloat16, SMALL.head_dim)
    if reason is not None:
        pytest.skip(reason)
    exact, fp8 = build("fp8"), build("fp8", attention="cudnn-fp8")
    inputs = case(exact, SIZES[0])
    assert relative(fp8(*inputs), exact(*inputs)) < 0.05


@pytest.mark.parametrize("name", [None, "fp8", "fp8-tensor"])
@torch.no_grad()
def test_a_feed_forward_in_halves_is_the_whole(name, monkeypatch):
    model = build(name)
    inputs = case(model, SIZES[3])  # an odd number of tokens
    whole = model(*inputs)
    monkeypatch.setattr(layers, "HALVED_TOKENS", 1)
    # one scale for the tensor is another one for each half
    assert relative(model(*inputs), whole) < (0.03 if name == "fp8-tensor" else 0.01)

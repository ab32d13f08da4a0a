"""The fused operations and FP8 formats, in plain torch against float64. On a GPU, tests/test_gpu_kernels.py compares
the Triton kernels with these; where Triton is installed without a GPU, its interpreter runs them here."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tensors import draw, relative, run_interpreted
from wan_core.models.wan.layers import rope_table
from wan_core.ops.kernels import fused, reference
from wan_core.ops.kernels.formats import BLOCK, FP8, FP8_MAX, Quantized, quantize_reference

FORMATS = ("tensor", "row", "block")
HALF_STEP = 2**-4  # E4M3 keeps three bits: a number is off by at most a sixteenth of itself
TINIEST = 2**-10  # or, below its normal range, by half of its smallest number


def spread(scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    wide = scale.shape[-1] not in (1, like.shape[-1])
    return scale.repeat_interleave(BLOCK, -1) if wide else scale.expand_as(like)


@settings(max_examples=20, deadline=None)
@given(
    fmt=st.sampled_from(FORMATS),
    rows=st.integers(1, 5),
    groups=st.integers(1, 4),
    power=st.integers(-30, 30),
    outlier=st.floats(1, 1e6),
    seed=st.integers(0, 2**31),
)
def test_quantising_is_off_by_at_most_half_a_step(fmt, rows, groups, power, outlier, seed):
    x = draw(rows, groups * BLOCK, seed=seed) * 2.0**power
    x[0, 0] *= outlier
    quantized = quantize_reference(x, fmt)
    assert quantized.data.dtype == FP8 and quantized.data.shape == x.shape and quantized.scale.dtype == torch.float32
    assert quantized.scale.shape == {"tensor": (1,), "row": (rows, 1), "block": (rows, groups)}[fmt]
    allowed = x.abs() * HALF_STEP * 1.0001 + spread(quantized.scale, x) * TINIEST
    assert ((quantized.dequantize() - x).abs() <= allowed).all()


@pytest.mark.parametrize("fmt", [None, *FORMATS])
@pytest.mark.parametrize("frames", [1, 3])
def test_norm_and_residual_are_the_formula(fmt, frames):
    x, update = draw(2, 3 * 4, 256, seed=1), draw(2, 3 * 4, 256, seed=2)
    gate, mul, add = (draw(2, frames, 256, seed=s) for s in (3, 4, 5))
    wide = lambda v: v.double().repeat_interleave(12 // frames, 1)  # noqa: E731
    total = x.double() + update.double() * wide(gate)
    normed = F.layer_norm(total, (256,), eps=1e-6) * wide(mul) + wide(add)
    found_total, quantized = fused.residual_norm(x.clone(), update.clone(), gate, mul, add, 1e-6, fmt)
    torch.testing.assert_close(found_total.double(), total, rtol=1e-6, atol=1e-6)
    assert torch.equal(found_total, fused.residual(x.clone(), update.clone(), gate))
    if fmt is None:
        torch.testing.assert_close(quantized.double(), normed, rtol=1e-5, atol=1e-5)
        plain = F.layer_norm(x.double(), (256,), eps=1e-6) * wide(mul) + wide(add)
        torch.testing.assert_close(fused.norm(x, mul, add, 1e-6).double(), plain, rtol=1e-5, atol=1e-5)
    else:
        assert relative(quantized.dequantize(), normed) < 0.04


@settings(max_examples=15, deadline=None)
@given(
    heads=st.integers(1, 4),
    half=st.sampled_from((4, 6, 16, 32)),
    weight=st.floats(0.01, 50),
    centre=st.booleans(),
    spike=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_scale_of_queries_and_keys_holds_whatever_comes(heads, half, weight, centre, spike, seed):
    """It is known before the numbers are: an RMSNorm bounds them. Also a row whose whole length is one number."""
    width = 2 * half * heads
    x = draw(1, 6, width, seed=seed)
    if spike:
        x[:, ::2] = 0
        x[:, ::2, seed % width] = 1e4
    norm = draw(width, seed=seed + 1) * weight
    axes = (2 * half - 4 * (half // 3), 2 * (half // 3), 2 * (half // 3))
    table = rope_table((1, 2, 3), axes)
    quantized = fused.head_norm_fp8(x.clone(), norm, heads, 1e-6, table, centre=centre)
    assert quantized.data.shape == (1, 6, heads, 2 * half) and quantized.scale.shape == (1,)
    exact = fused.head_norm(x.double(), norm.double(), heads, 1e-6, table).float()
    if centre:
        exact = exact - exact[:, ::32].mean((0, 1))
    assert (exact.abs().amax() / quantized.scale) <= FP8_MAX * 1.001  # nothing was clamped
    if not spike:
        assert relative(reference.hadamard_heads(quantized.dequantize()), exact) < 0.05


@pytest.mark.parametrize("dim", [8, 16, 64, 128, 256])
def test_hadamard_keeps_products_and_spreads_channels(dim):
    q, k = draw(1, 30, 2, dim, seed=1), draw(1, 20, 2, dim, seed=2)
    mixed = [reference.hadamard_heads(x) for x in (q, k)]
    scores = [torch.einsum("blhd,bshd->bhls", *pair) for pair in ((q, k), mixed)]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(reference.hadamard_heads(mixed[0]), q)
    for peak in (torch.eye(dim)[0], torch.ones(dim)):  # one channel, and what all channels share
        spread = reference.hadamard_heads(peak.reshape(1, 1, 1, dim))
        assert spread.abs().amax() <= 2 * peak.norm() * dim**-0.5


@pytest.mark.parametrize("block", [0, 128])
def test_fp8_of_mixed_heads_in_both_layouts(block):
    x = draw(2, 150, 3, 64) + 1
    mean = x.mean(1, keepdim=True)
    mixed = fused.hadamard_fp8(x, reference.length_scale(x, 2.0), mean, block)
    back = reference.hadamard_heads(Quantized(mixed.data, mixed.scale).dequantize())
    assert relative(back, x - mean) < 0.04
    assert not block or not mixed.memory[:, :, 150:].float().any()


@pytest.mark.parametrize("fmt", [None, *FORMATS])
def test_gelu_is_the_tanh_form(fmt):
    x = draw(3, 256) * 3
    exact = F.gelu(x.double(), approximate="tanh")
    output = fused.gelu(x.clone(), fmt)
    assert relative(output if fmt is None else output.dequantize(), exact) < (1e-6 if fmt is None else 0.04)


INTERPRETED = """
import torch
from wan_core.ops.kernels import reference, triton_ops
from wan_core.ops.kernels.formats import quantize_reference
from wan_core.models.wan.layers import rope_table

def draw(*shape): return torch.randn(shape).to(dtype)
def close(found, expected, allowed):
    error = float((found.float() - expected.float()).norm() / expected.float().norm())
    assert error < allowed, error
def plain(x): return x if isinstance(x, torch.Tensor) else x.dequantize()

torch.manual_seed(0)
EXACT, ROUGH = 0.01, 0.12  # the interpreter cuts digits off where the hardware rounds
for B, frames, each, C, H, dtype in ((1, 1, 10, 256, 2, torch.bfloat16), (2, 1, 8, 384, 3, torch.float16),
                                     (2, 3, 5, 192, 3, torch.bfloat16), (1, 2, 9, 96, 3, torch.bfloat16)):
    L = frames * each
    x, y = draw(B, L, C), draw(B, L, C)
    gate, mul, add = (torch.randn(B, frames, C) for _ in range(3))
    for fmt in (None, "row", *(("block",) if C in (256, 384) else ())):
        allowed = EXACT if fmt is None else ROUGH
        close(plain(triton_ops.norm(x, mul, add, 1e-6, fmt)), reference.scaled_norm(x, mul, add, 1e-6), allowed)
        for g in (None, gate):
            total, normed = triton_ops.residual_norm(x.clone(), y, g, mul, add, 1e-6, fmt)
            close(total, reference.residual(x, y, g), EXACT)
            close(plain(normed), reference.scaled_norm(reference.residual(x, y, g), mul, add, 1e-6), allowed)
        close(plain(triton_ops.gelu(x.clone(), fmt)), torch.nn.functional.gelu(x.float(), approximate="tanh"), allowed)
        if fmt: close(plain(triton_ops.quantize(x, fmt)), x, ROUGH)
    close(triton_ops.residual(x.clone(), y, gate), reference.residual(x, y, gate), EXACT)
    close(plain(triton_ops.quantize(x, "tensor")), x, ROUGH)
    D, weight = C // H, draw(C)
    table = rope_table((frames, 1, each), (D - 4 * (D // 6), 2 * (D // 6), 2 * (D // 6)))
    for rope in (None, table):
        exact = reference.rms_norm(x.float(), weight, 1e-6).unflatten(-1, (H, -1))
        exact = exact if rope is None else reference.rotate(exact, rope)
        close(triton_ops.head_norm(x.clone(), weight, 1e-6, rope, H), exact, EXACT)

for D in (16, 64, 128):
    x = torch.randn(2, 150, 2, 3, D).half()[:, :, 1]  # with strides; the interpreter multiplies no bf16
    for mean in (None, torch.randn(1, 1, 3, D), torch.randn(2, 1, 3, D)):
        scale = reference.length_scale(x, 2.0)
        expected = reference.hadamard_heads(x.float() if mean is None else x - mean)
        for block in (0, 128):
            found = triton_ops.hadamard_fp8(x, scale, mean, block)
            assert found.scale is scale
            close(found.data.float() * scale, expected, ROUGH)
            if block: assert found.memory.shape == (2, 3, 256, D) and not found.memory[:, :, 150:].float().any()

from wan_core.ops.quant.changed import TRIES, with_change
for N, K, size in ((5, 96, 0.003), (3, 5120, 0.03), (2, 13824, 0.003), (4, 64, 6.0)):
    weight = torch.randn(N, K)
    scale = weight.abs().amax(1, keepdim=True) / 448
    data, ratio = (weight / scale).to(torch.float8_e4m3fn), torch.tensor([1.0, 0.5] * 3)[:N, None]
    work = (data, ratio, weight + size * torch.randn(N, K), scale / ratio)
    assert torch.equal(triton_ops.with_change(*work, TRIES).float(), with_change(*work).float())

from wan_core.models.vae.layers import CausalConv3d, Chunk, RMSNorm
from wan_core.ops.kernels import triton_vae
for C, T, last, dtype in ((32, 1, False, torch.bfloat16), (40, 3, False, torch.half), (96, 2, True, torch.bfloat16)):
    norm, conv = RMSNorm(C).to(dtype), CausalConv3d(C, C, (3, 3, 3)).to(dtype)
    norm.gamma.data = draw(C, 1, 1, 1)
    x = draw(1, T, 5, 6, 2 * C)[..., :C].movedim(-1, 1)  # with a stride
    for earlier in (None, draw(1, 2, 5, 6, C).movedim(-1, 1)):
        history = {} if earlier is None else {conv: earlier.clone()}
        expected = conv.extend(torch.nn.functional.silu(norm(x)), Chunk(first=False, last=last, history=history))
        if T == 1 and earlier is None: continue
        found, kept = triton_vae.norm_silu_extend(x, None, norm.gamma, earlier, 2, not last)
        close(found, expected, EXACT)
        assert (kept is None) == last and (last or torch.equal(kept, found[:, :, -2:]))
        assert found.is_contiguous(memory_format=torch.channels_last_3d)
        beside, same = triton_vae.norm_silu_extend(x, None, norm.gamma, earlier, 2, not last, True)
        assert torch.equal(beside, torch.cat([found[:, :, tap : tap + T] for tap in range(3)], 1))
        assert last or torch.equal(same, kept)
        close(*(conv.convolve(one, Chunk(first=False, last=True)) for one in (beside, found)), EXACT)
        more, bias = draw(1, T, 5, 6, C).movedim(-1, 1), draw(C)
        biased, _ = triton_vae.norm_silu_extend(more, bias, norm.gamma, earlier, 2, False)
        plain, _ = triton_vae.norm_silu_extend(more + bias[:, None, None, None], None, norm.gamma, earlier, 2, False)
        close(biased, plain, ROUGH)
    for second in (None, draw(C)):
        h, sum_of = draw(1, T, 5, 6, C).movedim(-1, 1), bias if second is None else bias + second
        expected = h.float() + x + sum_of[:, None, None, None]
        found = triton_vae.add_with_bias(h, x, bias, second)
        close(found, expected, EXACT)
        assert found.data_ptr() == h.data_ptr()
print("all close")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: pip install triton")
def test_kernels_in_tritons_interpreter():
    run_interpreted(INTERPRETED)

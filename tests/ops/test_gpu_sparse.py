"""On an NVIDIA GPU: block-sparse kernels against the formula, layouts and passes against plain torch, and a denoise."""

from __future__ import annotations

import pytest
import torch

from benchmarks.setups import Setup
from tests import tensors
from tests.sparse_attention import known_of, random_route, route
from tests.tensors import relative
from wan_core.checkpoint.random import random_module
from wan_core.config import SparseOptions
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import ForwardInfo
from wan_core.ops.attention.fp8 import key_mean
from wan_core.ops.attention.protocol import AttentionCall
from wan_core.ops.attention.registry import BACKENDS
from wan_core.ops.attention.sdpa import math_reference
from wan_core.ops.attention.sparse.forward import SparseAttention, SparseForward, SparseFp8Attention
from wan_core.ops.attention.sparse.kernels import KERNELS, sparse_reference
from wan_core.ops.attention.sparse.routing import Route, Rule
from wan_core.ops.attention.sparse.slopes import slope_weights, slopes
from wan_core.ops.attention.tiles import make_tiles
from wan_core.ops.kernels import blocked, fused
from wan_core.ops.kernels.block_layout import Blocked, heads_first
from wan_core.ops.kernels.formats import FP8, Quantized
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
GRIDS = [(5, 17, 23), (4, 16, 16), (7, 20, 31)]  # 1,955 (35 tokens in the last block), 1,024 and 4,340 tokens


@pytest.fixture(params=[name for name in KERNELS if name != "math"])
def kernel(request):
    chosen = KERNELS[request.param]
    reason = chosen.why_not(CUDA, torch.bfloat16, 128)
    if reason is not None:
        pytest.skip(reason)
    return chosen


def allowed(kernel) -> float:
    return 0.12 if kernel.fp8 else 0.01


def qkv(tokens: int, heads: int = 3) -> list[torch.Tensor]:
    return tensors.qkv(tokens, tokens, heads, 128, device=CUDA, dtype=torch.bfloat16)


def poison() -> None:
    """Leave NaN in memory that is about to be handed out again: whoever reads what nobody wrote shows it."""
    filled = [torch.full((1 << 24,), float("nan"), device=CUDA) for _ in range(8)]
    filled += [torch.full((n << 16,), float("nan"), device=CUDA) for n in (1, 3, 7, 20)]
    del filled


def attention(kernel, tiles, rule: Rule, q, k, v) -> torch.Tensor:
    """The attention that a block runs, in the precision of the kernel."""
    call = AttentionCall(0, SparseForward(kernel, [], tiles, rule))
    if not kernel.fp8:
        return SparseAttention()(q, k, v, call)
    return SparseFp8Attention(128).quantized(*in_fp8(q, k, v), call).dequantize()


def in_fp8(q, k, v) -> tuple[Blocked, Blocked, Blocked]:
    laid = blocked.quantize_heads_first(q, 128), blocked.quantize_heads_first(k, 128, key_mean(k))
    return *laid, blocked.quantize_values(v.flatten(-2), v.shape[2], 128)


def on_host(kernel, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The numbers that `kernel` computes with, float32 on the CPU: an FP8 kernel's, times the Hadamard matrix and
    rounded. Blocks are ranked by their variance, which the matrix changes: of random numbers a third of the choice."""
    rounded = [Quantized(x.data, x.scale).dequantize() for x in in_fp8(*tensors)] if kernel.fp8 else tensors
    return [x.float().cpu() for x in rounded]


def allowed_behind_a_choice(kernel) -> float:
    """From the same numbers. FP8 rounds the output, 0.027, and probabilities, about as much; without the slopes it is
    0.38, without the means 0.5, with another score 0.45."""
    return 0.1 if kernel.fp8 else 0.05 + allowed(kernel)


@pytest.mark.parametrize("grid", GRIDS)
def test_kernel_is_attention_under_a_mask(kernel, grid):
    """Random routes, with a last block that is not full; nothing behind the tokens is read."""
    tokens = grid[0] * grid[1] * grid[2]
    q, k, v = qkv(tokens)
    chosen = Route(random_route(tokens, 128, seed=1, batch=1).blocks.to(CUDA))
    expected, expected_lse = sparse_reference(q.float(), k.float(), v.float(), chosen, 128)
    poison()
    if kernel.fp8:
        centred = k - key_mean(k)
        laid = blocked.quantize_heads_first(q, 128), blocked.quantize_heads_first(centred, 128)
        values = blocked.quantize_values(v.flatten(-2), 3, 128)
        out, lse = kernel.load()(*laid, values, chosen, 128)
        tail = (chosen.blocks == chosen.blocks.shape[2] - 1).any(-1)
        output = blocked.finish(
            out, lse, laid[0].data, 128, q_scale=laid[0].scale, pads=-tokens % 128, tail=tail, scale=values.scale
        )
        out = output.float() * values.scale
        assert relative(out, expected) < 0.12
        rows = tail.repeat_interleave(128, -1)[..., :tokens]
        less = torch.where(rows, blocked.without_pads(lse[..., :tokens], -tokens % 128), lse[..., :tokens])
        taken = (q * key_mean(k)).sum(-1, dtype=torch.float32).transpose(1, 2) * 128**-0.5
        assert (less + taken - expected_lse).abs().max() < 0.1
    else:
        out, lse = kernel.load()(q, k, v, chosen, 128)
        assert relative(out, expected) < allowed(kernel)
        assert (lse[..., :tokens] - expected_lse).abs().max() < 2 * allowed(kernel)
    assert out.isfinite().all()


@pytest.mark.parametrize("keep", [0.4, 1.0])
@pytest.mark.parametrize("grid", GRIDS)
def test_a_layer_is_that_of_plain_torch(kernel, grid, keep):
    """A whole layer on the device against the same on a CPU, from the same numbers: what is chosen is read, and its
    replacement is added. With every block it is dense attention."""
    q, k, v = qkv(grid[0] * grid[1] * grid[2])
    rule = Rule(keep)
    tiles, there = (make_tiles(grid, 128, torch.device(d)) for d in ("cuda", "cpu"))
    poison()
    output = attention(kernel, tiles, rule, q, k, v)
    if keep == 1.0:
        assert relative(output, math_reference(q.float(), k.float(), v.float())) < allowed(kernel)
        return
    state = SparseForward(KERNELS["math"], [], there, rule)
    expected = SparseAttention()(*on_host(kernel, q, k, v), AttentionCall(0, state))
    assert relative(output.cpu(), expected) < allowed_behind_a_choice(kernel)


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_finish_is_that_of_plain_torch(replaced, fp8):
    """With means and slopes, or without; from and to FP8."""
    if fused.why_not(CUDA) is not None:
        pytest.skip("Triton does not run here")
    tokens, tiles = 1955, make_tiles((5, 17, 23), 128, CUDA)
    q, k, v = qkv(tokens)
    chosen = route(q, k, v, 128, Rule(0.3), tiles.forced)
    selected, pooled = chosen.kept(tiles.blocks), None
    if replaced:
        means = known_of(k, v, 128)
        weights = slope_weights(blocked.pool(q, 128)[0], means, selected)
        slope = slopes(weights, means.keys, k, v, 128)
        hosts = [x.float().cpu() for x in (weights, means.keys, k, v)]
        assert relative(slope.cpu(), slopes(*hosts, 128)) < 0.02
        pooled = means.pooled(selected, slope)
    out, lse = sparse_reference(q, k, v, chosen, 128)
    arguments = {"pads": -tokens % 128, "tail": selected[..., -1], "pooled": pooled}
    if fp8:
        q = Quantized(q.to(FP8), torch.full((1,), 1.0, device=CUDA))
        arguments |= {"q_scale": q.scale, "scale": torch.full((1,), 0.01, device=CUDA)}
        q = q.data
    output = blocked.finish(out.clone(), lse, q, 128, **arguments)  # which it may write over
    with fused.use("torch"):
        expected = blocked.finish(out, lse, q, 128, **arguments)
    assert output.dtype == (FP8 if fp8 else torch.bfloat16) and output.is_contiguous()
    assert relative(output, expected) < (0.03 if fp8 else 0.01)


def test_passes_match_plain_torch():
    tokens, heads, dim = 1955, 5, 128
    q, _, v = qkv(tokens, heads)
    if fused.why_not(CUDA) is not None:
        pytest.skip("Triton does not run here")
    poison()
    values = blocked.quantize_values(v.flatten(-2), heads, 128)
    with fused.use("torch"):
        plain = blocked.quantize_values(v.flatten(-2), heads, 128)
    assert values.memory.shape == (1, heads, dim, 2048)
    assert values.memory.is_contiguous()
    assert not values.memory[..., tokens:].float().any()
    assert relative(*(Quantized(x.data, x.scale).dequantize() for x in (values, plain))) < 0.01
    for x in (q, values.data, heads_first(Quantized(q.to(FP8), values.scale), 128).data):
        pooled = blocked.pool(x, 128)
        with fused.use("torch"):
            expected = blocked.pool(x, 128)
        for a, b in zip(pooled, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    weight, rope = torch.rand(heads * dim, device=CUDA) + 0.5, torch.randn(tokens, 1, dim // 2, 2, device=CUDA)
    x = q.flatten(-2)
    for centre in (False, True):
        laid = fused.head_norm_fp8(x.clone(), weight.bfloat16(), heads, 1e-6, rope, centre=centre, block=128)
        usual = fused.head_norm_fp8(x.clone(), weight.bfloat16(), heads, 1e-6, rope, centre=centre)
        assert torch.equal(laid.data.float(), usual.data.float())
        assert laid.memory.shape == (1, heads, 2048, dim)
        assert not laid.memory[:, :, tokens:].float().any()


@pytest.mark.parametrize(("precision", "backend"), [("plain", "sdpa"), ("fp8", "cudnn-fp8")])
@pytest.mark.parametrize("compile", ["off", "blocks"])
def test_a_forward_is_close_to_dense(precision, backend, compile):
    """A transformer of random weights, everything read and then half: eager and compiled give the same."""
    setup = Setup("test", precision, backend, compile=compile)
    reason = BACKENDS[backend].why_not(CUDA, torch.bfloat16, 128) or setup.why_not(CUDA, torch.bfloat16, 128)
    if reason is not None:
        pytest.skip(reason)
    config = DiTConfig(
        in_channels=16, out_channels=16, dim=512, ffn_dim=1024, num_heads=4, num_layers=3, text_dim=64, text_len=32
    )
    model = random_module(config, device=CUDA, dtype=torch.bfloat16, quantization=setup.quantization(CUDA))
    assert isinstance(model, WanModel)
    x = torch.randn(1, 16, 5, 68, 92, device=CUDA)  # 7,820 tokens
    text = model.prepare_text(torch.randn(1, 8, 64, device=CUDA, dtype=torch.bfloat16))
    time = torch.tensor([900.0], device=CUDA)
    outputs = {}
    with torch.no_grad():
        for sparsity in (0.0, 0.001, 0.5):
            setup.apply(model)
            if sparsity == 0:
                outputs[sparsity] = model(x, time, text)
                continue
            tiles = SparseTiles(model, SparseOptions(sparsity=sparsity, ramp=0), (5, 34, 46))
            poison()
            with in_tiles(model, tiles):
                outputs[sparsity] = model(x, time, text, ForwardInfo(sparsity=sparsity))
    assert relative(outputs[0.001], outputs[0.0]) < (0.05 if precision == "fp8" else 0.02)
    assert outputs[0.5].isfinite().all()
    assert relative(outputs[0.5], outputs[0.0]) < 0.5

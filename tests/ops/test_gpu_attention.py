"""On an NVIDIA GPU: every attention backend that runs here against the formula, with views and log-sum-exp."""

from __future__ import annotations

import pytest
import torch

from tests import tensors
from tests.tensors import relative
from wan_core.cli import doctor
from wan_core.ops.attention.fp8 import Fp8Attention, reference
from wan_core.ops.attention.registry import BACKENDS, AttentionError, resolve_attention
from wan_core.ops.attention.sdpa import math_lse, math_reference
from wan_core.ops.kernels.formats import FP8, Quantized

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


@pytest.fixture(params=[name for name in BACKENDS if not name.startswith("math")])
def backend(request):
    chosen = BACKENDS[request.param]
    reason = chosen.why_not(CUDA, torch.bfloat16, 128)
    if reason is not None:
        with pytest.raises(AttentionError):
            resolve_attention(request.param, CUDA, torch.bfloat16, 128)
        pytest.skip(reason)
    return chosen


def allowed(backend) -> float:
    return doctor.TOLERANCE if backend.exact else doctor.ROUNDED


def qkv(queries: int, keys: int, dim: int = 128) -> list[torch.Tensor]:
    return tensors.qkv(queries, keys, 3, dim, device=CUDA, dtype=torch.bfloat16)


@pytest.mark.parametrize(("queries", "keys", "dim"), [(333, 201, 128), (4136, 4136, 128), (1001, 1001, 64)])
def test_backend_matches_the_formula_and_the_doctor_says_so(backend, queries, keys, dim):
    q, k, v = qkv(queries, keys, dim=dim)
    assert relative(backend.load()(q, k, v), math_reference(q.float(), k.float(), v.float())) <= allowed(backend)
    checked = doctor.attention_state(backend.name, CUDA)
    assert checked["usable"], checked


def test_log_sum_exp_of_keys_with_a_mean(backend):
    if not backend.gives_lse:
        pytest.skip("has no log-sum-exp form")
    q, k, v = qkv(333, 201)
    k = k + 3
    attend = backend.load()
    assert attend.gives_lse
    out, lse = attend.with_lse(q, k, v)
    expected_out, expected = math_lse(q.float(), k.float(), v.float())
    assert lse.shape == (1, 3, 333) and float((lse - expected).abs().max()) <= allowed(backend)
    assert relative(out, expected_out) <= allowed(backend)


def test_it_follows_the_current_stream_and_never_waits(backend):
    attend = backend.load()
    q, k, v = qkv(1000, 1000)
    expected = attend(q, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # so that a kernel on another stream would read q before it is there
            output = attend(q * 1, k * 1, v * 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(output, expected)


def test_fp8_in_and_out_is_the_reference(backend):
    attend = backend.load()
    if not isinstance(attend, Fp8Attention):
        pytest.skip("not an FP8 backend")
    fused = torch.randn(1, 1001, 3, 4, 128, device=CUDA).to(FP8)
    scales = [torch.full((1,), s, device=CUDA) for s in (1.5, 0.03, 0.7)]
    q, k, v = (Quantized(x, s) for x, s in zip(fused.unbind(2), scales, strict=True))
    out, scale = attend.quantized(q, k, v)
    (expected, _), lse = reference(q, k, v)
    assert out.dtype == FP8 and scale is v.scale
    assert relative(out.float(), expected.float()) < 0.08  # it also rounds the probabilities
    if attend.gives_lse:
        assert float((attend.quantized_lse(q, k, v)[1] - lse).abs().max()) < 0.01

"""Attention backends: the table, who is refused where and why, log-sum-exp, FP8 arithmetic, gradients."""

from __future__ import annotations

import itertools
import re
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tensors import draw, qkv, relative
from wan_core.cli import doctor
from wan_core.ops.attention import dense
from wan_core.ops.attention.fp8 import key_mean, math_fp8, quantize, quantize_mixed, reference
from wan_core.ops.attention.protocol import Attention, Dense
from wan_core.ops.attention.registry import (
    BACKENDS,
    AttentionError,
    Backend,
    auto_choice,
    resolve_attention,
)
from wan_core.ops.attention.sdpa import SDPA, math_lse, math_reference, sdpa, sdpa_lse
from wan_core.ops.kernels.formats import FP8, Quantized
from wan_core.ops.kernels.reference import hadamard_heads
from wan_core.ops.library import Library, probe

CPU = torch.device("cpu")
sizes = st.integers(1, 70)


def says(sentence: str | None, pattern: str) -> bool:
    return sentence is not None and re.search(pattern, sentence) is not None


# ------------------------------------------------------------------------------------------------------------ the table


def test_every_backend_loads_without_its_library_and_says_why_it_cannot_run():
    for name, backend in BACKENDS.items():
        attend = backend.load()
        assert isinstance(attend, Attention), name
        assert attend.gives_lse == backend.gives_lse, name
        assert attend.takes_fp8 == name.endswith("-fp8")
        reason = backend.why_not(CPU, torch.float32, 128)
        assert (reason is None) == (name in ("sdpa", "math", "math-fp8")), (name, reason)


def test_an_unknown_name_lists_the_known():
    with pytest.raises(AttentionError, match=r"'flash9' is not known; use one of: auto, fast, sdpa, .*cudnn-fp8"):
        resolve_attention("flash9", CPU)


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "head_dim", "message"),
    [
        ("cudnn", None, torch.bfloat16, 128, "NVIDIA GPU"),
        ("cudnn", (7, 5), torch.bfloat16, 128, r"8\.0 \(Ampere\) or newer, this one has 7\.5"),
        ("flash4", (8, 6), torch.bfloat16, 128, r"9\.0 \(Hopper\)"),
        ("flash3", (10, 0), torch.bfloat16, 128, r"above compute capability 9\.x"),
        ("cudnn-fp8", (8, 9), torch.bfloat16, 128, r"9\.0 \(Hopper\)"),
        ("flash4", (9, 0), torch.float32, 128, "not in float32: use sdpa"),
        ("cudnn-fp8", (9, 0), torch.bfloat16, 72, "up to 128 in steps of 16, this model has 72: use sdpa"),
        ("sage", (9, 0), torch.bfloat16, 32, "64 or 96 or 128, this model has 32"),
        ("flash2", (9, 0), torch.bfloat16, 260, "up to 256 in steps of 8"),
        ("int8", (7, 0), torch.bfloat16, 128, r"7\.5 \(Turing\) or newer, this one has 7\.0"),
    ],
)
def test_what_a_kernel_cannot_compute_is_said(name, capability, dtype, head_dim, message):
    assert says(BACKENDS[name].needs.why_not(capability, dtype, head_dim), message)


@pytest.mark.parametrize("name", ["sage", "flash3"])
def test_a_refusal_says_what_to_take_and_no_path(name):
    with pytest.raises(AttentionError, match=f"{name}.* cannot run on cpu: .*Use auto") as refused:
        resolve_attention(name, CPU)
    assert "python" not in str(refused.value)


# ----------------------------------------------------------------------------------------------------------------- auto

EVERYTHING, NOTHING = BACKENDS.keys(), frozenset({"sdpa", "cudnn"})


@pytest.mark.parametrize(
    ("capability", "dtype", "installed", "expected"),
    [
        (None, torch.float32, EVERYTHING, "sdpa"),
        (None, torch.bfloat16, EVERYTHING, "sdpa"),
        ((7, 5), torch.bfloat16, EVERYTHING, "sdpa"),
        ((8, 0), torch.bfloat16, EVERYTHING, "flash2"),
        ((8, 9), torch.bfloat16, NOTHING, "sdpa"),
        ((9, 0), torch.bfloat16, EVERYTHING, "flash4"),
        ((9, 0), torch.bfloat16, NOTHING, "cudnn"),
        ((9, 0), torch.bfloat16, {"sdpa"}, "sdpa"),
        ((9, 0), torch.float32, EVERYTHING, "sdpa"),
        ((10, 0), torch.bfloat16, EVERYTHING, "cudnn"),
        ((10, 3), torch.bfloat16, {"flash4", "sdpa"}, "flash4"),
        ((12, 0), torch.bfloat16, EVERYTHING, "sdpa"),
        ((99, 0), torch.bfloat16, EVERYTHING, "sdpa"),
    ],
)
def test_auto_by_card_precision_and_what_is_installed(capability, dtype, installed, expected):
    assert auto_choice(capability, dtype, 128, installed.__contains__) == expected


def test_auto_never_changes_numbers_and_always_finds_one():
    capabilities = [None, *itertools.product(range(7, 14), (0, 6))]
    for capability, dtype, dim in itertools.product(
        capabilities, (torch.bfloat16, torch.float32), (None, 30, 128, 512)
    ):
        backend = BACKENDS[auto_choice(capability, dtype, dim, lambda name: True)]
        assert backend.exact and backend.needs.why_not(capability, dtype, dim) is None


# ------------------------------------------------------------------------------------------------------------ libraries


COUNT = itertools.count()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package whose import runs `source`; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(source: str) -> str:
        name = f"fake_attention_{next(COUNT)}"  # never the same: Python keeps what it imported
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return name

    return write


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise ImportError('libfoo.so: undefined symbol: _ZN3c10')", r"cannot be imported \(ImportError: libfoo"),
        ("raise OSError('libcudart.so.12: cannot open')", r"OSError: libcudart"),
        ("raise RuntimeError('first line\\nsecond')", r"RuntimeError: first line\)"),
        ("raise RuntimeError", r"RuntimeError: no message"),
        ("import torch; torch.not_there", r"AttributeError: .*not_there"),
        ("assert False", "AssertionError"),
        ("def attend(:", "SyntaxError"),
        ("import not_installed_at_all", r"cannot be imported .*not_installed_at_all"),
        ("def __getattr__(name): import not_installed_at_all", r"cannot be imported .*not_installed_at_all"),
        ("attends = print", r"too old or incomplete, it has no attend"),
    ],
)
def test_a_broken_library_is_a_sentence(package, source, message):
    library = Library("Fake", package(source), "attend", "pip install fake")
    assert says(probe(library), message)
    assert probe(library).endswith("pip install fake") and "\n" not in probe(library)


# ---------------------------------------------------------------------------------------------------------- log-sum-exp


@settings(deadline=None, max_examples=15)
@given(sizes, sizes, st.integers(1, 3), st.sampled_from([8, 32, 64]), st.sampled_from([sdpa_lse, math_lse]))
def test_log_sum_exp_is_torchs(queries, keys, heads, dim, attend):
    q, k, v = qkv(queries, keys, heads, dim, batch=2)
    out, lse = attend(q, k, v)
    expected = torch.logsumexp(torch.einsum("blhd,bshd->bhls", q, k) * dim**-0.5, -1)
    assert lse.shape == (2, heads, queries) and lse.dtype == torch.float32
    torch.testing.assert_close(lse, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out, math_reference(q, k, v), atol=1e-5, rtol=1e-4)


@settings(deadline=None, max_examples=15)
@given(sizes, sizes, sizes, st.sampled_from(["sdpa", "math", "math-fp8"]))
def test_two_parts_of_the_keys_merge_to_the_whole(queries, first, second, name):
    q, k, v = qkv(queries, first + second)
    k[:, first:] += 2  # parts whose means differ: FP8 must put back what it took off
    form = BACKENDS[name].load().with_lse
    outs, lses = zip(*(form(q, k[:, part], v[:, part]) for part in (slice(0, first), slice(first, None))), strict=True)
    weights = torch.stack(lses).softmax(0).transpose(-1, -2)[..., None]  # [parts, B, L, H, 1]
    merged = (torch.stack(outs) * weights).sum(0)
    assert relative(merged, math_reference(q, k, v)) < (1e-5 if BACKENDS[name].exact else 0.15)


# ------------------------------------------------------------------------------------------------------------------ FP8


@settings(deadline=None, max_examples=15)
@given(st.floats(-30, 30), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 9))
def test_quantising_rounds_once_under_a_power_of_two(exponent, dtype, seed):
    x = (draw(1, 50, 2, 16, seed=seed) * 2**exponent).to(dtype)
    data, scale = quantize(x)
    assert data.dtype == FP8 and scale.shape == (1,) and scale.dtype == torch.float32
    assert torch.frexp(scale).mantissa.item() == 0.5
    assert 30 <= data.float().abs().max() <= 256
    error = (data.float() * scale - x.float()).abs()
    # half a step of three bits; below 2^-6 the steps are even
    assert (error <= x.float().abs() / 16 + scale * 2.0**-10).all()


@settings(deadline=None, max_examples=15)
@given(st.floats(-30, 30), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), st.booleans())
def test_queries_and_keys_fit_whatever_sticks_out(exponent, dtype, centred, spike):
    """Nothing is clamped, and a token that is a hundred times longer leaves the others their digits."""
    x = draw(1, 50, 2, 64, seed=3) * 2**exponent
    x[:, 7] *= 100 if spike else 1
    x = x.to(dtype)
    mean = key_mean(x) if centred else None
    quantized = quantize_mixed(x, mean)
    wanted = hadamard_heads((x if mean is None else x - mean).float())
    assert (wanted / quantized.scale).abs().max() <= 448
    for rows in (slice(None), slice(8, None)):
        assert relative(quantized.dequantize()[:, rows], wanted[:, rows]) < 0.04


def test_channels_that_stick_out_cost_fp8_little():
    """Without the Hadamard matrix their rounding is most of the error."""
    q, k, v = qkv(200, 150, heads=2, dim=128)
    wide = torch.ones(128)
    wide[:4] = 12
    q, k = q * wide, k * wide
    exact = math_reference(q, k, v)
    assert relative(math_fp8()(q, k, v), exact) < 0.1
    plain = [quantize(x) for x in (q, k - key_mean(k), v)]
    assert relative(reference(*plain)[0].dequantize(), exact) > 0.2


@settings(deadline=None, max_examples=10)
@given(st.floats(-40, 40), st.integers(0, 5))
def test_a_constant_added_to_the_keys_costs_fp8_nothing(shift, seed):
    """This is what removing K's mean buys: without it the error grows with the shift."""
    q, k, v = qkv(200, 150, dim=64)
    direction = draw(1, 1, 2, 64, seed=seed)
    expected = math_reference(q, k, v)
    assert relative(math_fp8()(q, k + shift * direction, v), expected) < 0.1


def test_the_output_under_vs_scale_cannot_overflow():
    q, k, v = qkv(20, 30)
    v[:, 3] = 100  # one key whose value is the largest, and every query looks at it alone
    k[:, 3] = 60 * q.mean(1)
    q = q.abs() * q.mean(1).sign()
    out = math_fp8()(q, k, v)
    assert out.isfinite().all() and relative(out, math_reference(q, k, v)) < 0.1


def test_fp8_attention_takes_and_returns_fp8():
    """What a fused kernel hands over: any per-tensor scale, K's mean gone, and an output that needs no other scale."""
    q, k, v = qkv(65, 40)
    parts = [Quantized((x / s).to(FP8), torch.tensor([s])) for x, s in ((q, 0.03), (k, 1 / 64), (v, 0.011))]
    out, scale = math_fp8().quantized(*parts)
    assert out.dtype == FP8 and out.shape == q.shape and torch.equal(scale, parts[2].scale)
    exact = math_reference(*(x.dequantize() for x in parts))
    assert relative(out.float() * scale, exact) < 0.04  # E4M3 of the output alone


# -------------------------------------------------------------------------------------------------------- torch.compile


class Counting:
    """torch.compile's aot_eager, counting the graphs it finished."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph, inputs):
        compiled = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
        self.graphs += 1  # not before: it may ask for the graph again, with less made symbolic
        return compiled


def test_one_graph_for_every_length():
    """Cross-attention is compiled with the rest of a block; what self-attention runs never is."""
    torch._dynamo.reset()
    counting = Counting()
    compiled = torch.compile(SDPA, fullgraph=True, dynamic=True, backend=counting)
    for length in (40, 65, 129):
        q, k, v = qkv(length, 33)
        torch.testing.assert_close(compiled(q, k, v), SDPA(q, k, v))
    assert counting.graphs == 1


# --------------------------------------------------------------------------------------------------------- the protocol


@pytest.mark.parametrize(
    "call", [math_fp8(), math_fp8().with_lse, dense.sage, dense.int8], ids=["fp8", "fp8 lse", "sage", "int8"]
)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_attention_that_rounds_refuses_gradients(call, which):
    """They would be lost without a word: rounding has none."""
    tensors = qkv(20, 20)
    tensors[which].requires_grad_(True)
    with pytest.raises(RuntimeError, match="has no backward pass"):
        call(*tensors)
    if call not in (dense.sage, dense.int8):
        with torch.no_grad():
            call(*tensors)
        call(*(x.detach() for x in tensors))


# --------------------------------------------------------------------------------------------------------------- doctor


def fails(q, k, v):
    raise RuntimeError("no kernel image is available\nfor this device")


@pytest.mark.parametrize(
    ("attend", "message"),
    [
        (Dense(lambda q, k, v: sdpa(q, k, v) * 1.05), r"relative error 0\.05, allowed 0\.01"),
        (Dense(lambda q, k, v: sdpa(q, k, v) * float("nan")), "relative error nan"),
        (Dense(sdpa, lambda q, k, v: (sdpa(q, k, v), math_lse(q, k, v)[1] / 0.6931)), "log-sum-exp error"),
        (Dense(fails), "no kernel image is available$"),
    ],
)
def test_doctor_reports_a_backend_that_computes_something_else(monkeypatch, attend, message):
    wrong = Backend("wrong", "", load=lambda: attend, gives_lse=attend.gives_lse)
    monkeypatch.setitem(BACKENDS, "wrong", wrong)
    report = doctor.examine("cpu")["attention"]["wrong"]
    assert not report["usable"]
    assert says(report["why_not"], message)

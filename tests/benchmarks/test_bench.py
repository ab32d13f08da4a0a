"""The benchmark: what it counts is what ran, what it compares computes the same, and what cannot run says so."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.__main__ import main as bench_main
from benchmarks.cases import make_case
from benchmarks.measure import measure, weights_bytes
from benchmarks.peaks import Flops, forward_flops, measure_peaks, seconds_at_peak
from benchmarks.peers import PEERS
from benchmarks.profiling import CLASSES, Kernel, Span, by_class, kernel_class, profile_table
from benchmarks.setups import PLAIN, REFERENCE, SETUPS, find_setup
from benchmarks.single import Ladder
from tests.comfyui import find_comfyui, python_of
from wan_core.checkpoint.random import random_module
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.protocol import Dense
from wan_core.ops.attention.sdpa import math_reference

CPU = torch.device("cpu")
SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=128, ffn_dim=256, num_heads=2, num_layers=2, text_dim=48, text_len=32
)
TORCH_ONLY = "plain/sdpa/torch"  # as `plain torch`, under another name: rows that must agree with it


def small_model(config: DiTConfig = SMALL, **options: Any) -> WanModel:
    model = random_module(config, device=CPU, dtype=torch.float32, **options)
    assert isinstance(model, WanModel)
    return model


def bench(out: Path, *arguments: str) -> dict[str, Any]:
    """The file that `bench` writes for the embedded model on the CPU; it must end well."""
    path = out / "bench.json"
    assert bench_main(["--device", "cpu", *arguments, "--out", str(path)]) == 0
    return json.loads(path.read_text())


# ----------------------------------------------------------------------------------------------------------- arithmetic


@settings(max_examples=12)
@given(
    channels=st.sampled_from([(16, 16), (36, 16), (48, 48)]),
    heads=st.integers(1, 3),
    ffn=st.integers(1, 40).map(lambda n: 8 * n),
    layers=st.integers(1, 3),
    grid=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
)
def test_operations_are_those_that_torch_counts(channels, heads, ffn, layers, grid) -> None:
    config = replace(
        SMALL, in_channels=channels[0], out_channels=channels[1], dim=32 * heads, num_heads=heads, ffn_dim=ffn
    )
    model = small_model(replace(config, num_layers=layers))
    for block in model.blocks:  # torch counts products, and not those inside its CPU attention
        block.self_attn.attend = block.cross_attn.attend = Dense(math_reference)
    T, Y, X = grid
    with torch.no_grad():
        text = model.prepare_text(torch.randn(1, 5, config.text_dim))
        with FlopCounterMode(display=False) as counter:
            model(torch.randn(1, channels[0], T, 2 * Y, 2 * X), torch.tensor([900.0]), text)
    assert forward_flops(model.config, T * Y * X).total == counter.get_total_flops()


def test_time_at_peak_takes_each_part_in_its_own_precision() -> None:
    flops = Flops(linears=60, self_attention=30, cross_attention=6, ends=4)
    peaks = {"bf16_tflops": 1e-12, "fp8_tflops": 2e-12}
    assert seconds_at_peak(flops, peaks, fp8_linears=False, fp8_attention=False) == flops.total == 100
    assert seconds_at_peak(flops, peaks, fp8_linears=True, fp8_attention=False) == 70
    assert seconds_at_peak(flops, peaks, fp8_linears=True, fp8_attention=True) == 55


def test_peaks_are_positive_and_fp8_is_not_measured_where_there_is_none() -> None:
    peaks = measure_peaks(CPU)
    assert peaks.keys() == {"bf16_tflops", "copy_tb_s"} and min(peaks.values()) > 0


def test_memory_that_is_shared_counts_once() -> None:
    model = small_model()
    alone = sum(p.numel() * 4 for p in model.parameters())
    assert weights_bytes(model) == alone
    model.head.head.weight = model.blocks[0].ffn[0].weight
    assert weights_bytes(model) < alone


def test_every_run_is_timed_but_the_first() -> None:
    runs: list[int] = []

    def run() -> torch.Tensor:
        runs.append(0)
        return torch.full((2,), float(len(runs)))

    measured = measure(lambda: run, CPU, 3)
    assert len(runs) == 4 and len(measured.seconds) == 3 and measured.output.tolist() == [4, 4]
    assert "peak_gib" not in measured.numbers() and "compilations" not in measured.numbers()


# ---------------------------------------------------------------------------------------------------------------- peers


@pytest.mark.parametrize("channels", [(16, 16), (36, 16)])
def test_diffusers_computes_what_ours_does_on_the_same_memory(channels) -> None:
    model = small_model(replace(SMALL, in_channels=channels[0], out_channels=channels[1]))
    case = make_case(model, "48x64x9", 8)
    peer, run = PEERS["diffusers"].ready(model)
    with torch.no_grad():
        ours, theirs = model(case.x, case.timestep, case.contexts[0]), run(case.x, case.timestep, case.contexts[0])
    assert float((theirs - ours).norm() / ours.norm()) <= 1e-4
    assert {p.data_ptr() for p in peer.parameters()} <= {p.data_ptr() for p in model.parameters()}


@pytest.mark.comfy
def test_comfyui_computes_what_ours_does(tmp_path: Path) -> None:
    """In ComfyUI's own Python, which has what it needs; as a user would measure it."""
    checkout, out = find_comfyui(), tmp_path / "bench.json"
    arguments = ["--model", "tiny", "--device", "cpu", "--precision", "fp32", "--size", "64x48x5", "--runs", "1"]
    chosen = ["--setup", "comfyui", "--setup", TORCH_ONLY, "--out", str(out)]
    environment = {**os.environ, "COMFYUI_PATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [python_of(checkout), "-m", "benchmarks", "single", *arguments, *chosen]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert result["rows"][0]["name"] == "comfyui" and result["rows"][0]["error"] <= 1e-4
    assert result["versions"]["comfyui"] not in ("", "unknown")


def test_a_peer_that_is_not_there_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "nowhere"))
    reason = PEERS["comfyui"].why_not()
    assert reason is not None and "COMFYUI_PATH" in reason
    arguments = ["single", "--device", "cpu", "--setup", "comfyui", "--size", "64x48x5", "--runs", "1"]
    assert bench_main(arguments) == 0
    assert "COMFYUI_PATH" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------- the ladder


def test_the_ladder_has_a_row_for_everything_that_was_asked_for(tmp_path: Path) -> None:
    """Numbers where it runs, the reason where it does not, and every size."""
    names = ["diffusers", "plain torch", TORCH_ONLY, "fp8/sdpa/torch", "fp8/math-fp8/torch", "+ flash4", "te-current"]
    chosen = [argument for name in names for argument in ("--setup", name)]
    sizes = ["--size", "64x48x5", "--size", "48x48x9"]
    result = bench(tmp_path, "--suite", "single", "--precision", "fp32", "--runs", "1", *sizes, *chosen)
    rows = {(row["size"], row["name"]): row for row in result["rows"]}
    assert rows.keys() == {(size, name) for size in ("64x48x5", "48x48x9") for name in names}
    assert [row["size"] for row in result["rows"]] == ["64x48x5"] * len(names) + ["48x48x9"] * len(names)
    assert result["peaks"]["bf16_tflops"] > 0 and result["versions"]["diffusers"]
    for size in ("64x48x5", "48x48x9"):
        for name in ("+ flash4", "te-current"):
            assert "GPU" in rows[size, name]["why_not"] and "seconds" not in rows[size, name]
        measured = {name: rows[size, name] for name in names[:5]}
        assert all(row["seconds"] > 0 and row["tflops"] > 0 and row["of_peak"] > 0 for row in measured.values())
        assert measured["plain torch"]["error"] == measured[TORCH_ONLY]["error"] == 0
        assert 0 < measured["diffusers"]["error"] <= 1e-4
        errors = measured["fp8/sdpa/torch"]["error"], measured["fp8/math-fp8/torch"]["error"]
        assert errors[0] != errors[1] and all(0.01 < error < 0.12 for error in errors)
        assert measured["fp8/sdpa/torch"]["weights_gib"] < 0.5 * measured["plain torch"]["weights_gib"]


def test_a_row_that_fails_says_so_and_the_others_go_on() -> None:
    """FP8 needs multiples of 16: found when the linears are replaced, in a setup that the device could run."""
    config = replace(SMALL, dim=48, num_heads=2, ffn_dim=72)

    def model(precision):
        return small_model(config, quantization=precision), 8

    ladder = Ladder(model, ["48x48x5"], CPU, torch.float32, 1, {"bf16_tflops": 1.0})
    rows = list(ladder.rows([find_setup("fp8/sdpa/torch"), find_setup(TORCH_ONLY)]))
    assert "multiples of 16" in rows[0]["failed"] and "seconds" not in rows[0]
    assert rows[1]["error"] == 0


def test_ratios_refer_to_the_compiled_peer_of_the_same_size() -> None:
    """Whether or not that row was measured first; a row without one has no ratio."""
    ladder = Ladder(lambda precision: (small_model(), 8), ["48x48x5"], CPU, torch.float32, 1, {"bf16_tflops": 1.0})
    alone = list(ladder.rows([find_setup(TORCH_ONLY)]))
    assert "ratio" not in alone[0]
    ladder.ratio_to["48x48x5"] = {"seconds": 3.0}
    again = list(ladder.rows([find_setup(TORCH_ONLY)]))
    assert again[0]["ratio"] == pytest.approx(3.0 / again[0]["seconds"], rel=1e-3)
    assert again[0]["ratio_to"] == "diffusers-compiled"


def test_a_compiled_peer_reports_what_its_first_run_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is the one that ratios refer to, wherever it stands in the list. Traced and counted; the compiler behind that
    is left out."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    ladder = Ladder(lambda precision: (small_model(), 8), ["48x48x5"], CPU, torch.float32, 1, {"bf16_tflops": 1.0})
    rows = list(ladder.rows([find_setup(TORCH_ONLY), PEERS["diffusers"], PEERS["diffusers-compiled"]]))
    assert [row["name"] for row in rows] == ["diffusers-compiled", "diffusers", TORCH_ONLY]
    compiled, eager, ours = rows
    assert compiled["compilations"] == 1 and compiled["graph_breaks"] == 0 and compiled["compile_seconds"] > 0
    assert compiled["ratio"] == 1 and compiled["error"] <= 1e-4
    assert "compilations" not in eager and "compilations" not in ours
    assert eager["ratio"] == pytest.approx(compiled["seconds"] / eager["seconds"], rel=1e-2)


def test_one_technique_a_row_and_all_of_them_known() -> None:
    """Every row of the table differs from another in one thing, so that a difference has one cause."""
    setups = list(SETUPS.values())
    for setup in setups:
        if setup != REFERENCE:
            others = [o for o in setups if o != setup]
            fields = ("precision", "attention", "kernels", "compile", "keep")
            assert min(sum(getattr(setup, f) != getattr(o, f) for f in fields) for o in others) == 1, setup.name
    assert REFERENCE.precision == PLAIN and REFERENCE.why_not(CPU, torch.float32, 64) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--suite", "single", "--setup", "fp9"], "plain torch"),
        (["--suite", "single", "--setup", "fp9/sdpa"], "fp8-tensor"),
        (["--suite", "single", "--setup", "fp8/flash9"], "flash4"),
        (["--suite", "single", "--setup", "fp8/sdpa/fast"], "/compile"),
        (["--suite", "startup", "--setup", "fp8/sdpa"], "--setup means nothing"),
        (["--suite", "single", "--runs", "0"], "at least 1"),
        (["--suite", "single", "--size", "64"], "WIDTHxHEIGHT"),
    ],
)
def test_bad_options_are_one_readable_line(arguments, says, capsys) -> None:
    assert bench_main(["--device", "cpu", *arguments]) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


# -------------------------------------------------------------------------------------------------------------- profile


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
         "attention"),
        ("cudnn_generated_oss_sdpa_e4m3_kernel0_0", "attention"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrbf16gmem",
         "attention"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, cutlass::bfloat16_t>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention)", "attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNT", "gemm bf16"),
        ("nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT", "gemm fp8"),
        ("nvjet_sm90_qqtst_mma_128x256x64_4_64x256x128_cga2x1_TNN", "gemm fp8"),
        ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x128_warpgroupsize1x1x1_execute_kernel", "gemm fp8"),
        ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<"
         "cutlass::gemm::collective::CollectiveMma<cutlass::float_e4m3_t>>>>", "gemm fp8"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm bf16"),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8", "gemm fp32"),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>", "gemm fp32"),
        ("_residual_norm_kernel", "norm"),
        ("_head_norm_kernel", "rope"),
        ("_activate_kernel", "gelu, quantise"),
        ("_scale_kernel", "quantise"),
        ("void transformer_engine::(anonymous namespace)::cast_transpose_general_kernel<8, 4>", "quantise"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::BFloat16, at::native::AbsMaxOps<float>>>",
         "quantise"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>", "norm"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>",
         "gelu"),
        ("void at::native::elementwise_kernel<128, 2, MulFunctor<c10::complex<float>>>", "rope"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(TensorIteratorBase&)>", "copy"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("Memset (Device)", "copy"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>, 2>", "copy"),
        ("void at::native::unrolled_elementwise_kernel<at::native::addcmul_cuda_scalar_tensor2_kernel>", "residual"),
        ("triton_red_fused__to_copy_add_addcmul_native_layer_norm_0", "norm"),
        ("triton_poi_fused_gelu_1", "gelu"),
        ("something_new", "other"),
    ],
)  # fmt: skip
def test_kernels_are_classed_by_name(name: str, kind: str) -> None:
    assert kernel_class(name) == kind
    assert kind in CLASSES


kernels = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20), st.sampled_from(["nvjet_tst", "sdpa", "Memset"])), min_size=1
).map(lambda rows: [Kernel(name, float(begin), float(begin + length)) for begin, length, name in rows])


@given(kernels=kernels)
def test_idle_time_is_what_no_kernel_covers(kernels: list[Kernel]) -> None:
    covered = {tick for k in kernels for tick in range(int(k.begin), int(k.end))}
    span = Span.of(kernels)
    assert span.busy == len(covered)
    assert span.whole == max(covered) + 1 - min(covered)
    rows = {row["class"]: row for row in by_class(kernels)}
    assert rows["idle"]["seconds"] == pytest.approx((span.whole - span.busy) / 1e6)
    work = sum(row["seconds"] for kind, row in rows.items() if kind not in ("idle", "forward"))
    assert work == pytest.approx(sum(k.end - k.begin for k in kernels) / 1e6)
    assert rows["forward"]["calls"] == len(kernels)


def test_a_forward_is_taken_apart(tmp_path: Path, capsys) -> None:
    chosen = ["--setup", "plain torch", "--setup", "+ flash4"]
    result = bench(tmp_path, "--suite", "profile", "--model", "tiny", "--size", "48x48x5", *chosen)
    classes = {row["class"]: row for row in result["rows"] if "class" in row}
    assert classes["attention"]["calls"] == 2 * 8 and classes["gelu"]["calls"] == 8  # of eight blocks
    assert {"gemm", "norm", "idle", "forward"} <= classes.keys()
    assert next(r for r in result["rows"] if r["name"] == "+ flash4")["why_not"]
    assert result["kernels"]["plain torch, 48x48x5"][0]["seconds"] > 0
    printed = capsys.readouterr().out
    assert "| attention |" in printed and "+ flash4: flash4: needs an NVIDIA GPU" in printed
    assert profile_table(result["rows"]) in printed

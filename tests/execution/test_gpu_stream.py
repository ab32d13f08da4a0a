"""Streaming, locked memory and staged loading on an NVIDIA GPU: the same bits, without waiting, within the limit."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.denoised import denoise
from tests.execution.turns import growth
from tests.streamed_experts import run as run_experts
from wan_core.checkpoint import load_dit, save
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.staged import Reading
from wan_core.config import MagCacheOptions, SkipOptions, TaylorSeerOptions
from wan_core.execution.memory.residency import Residency, Waits
from wan_core.execution.optimize import optimize
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.attention.registry import resolve_attention
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.pipeline.settings import find_quantization
from wan_core.sampling.cache.curves import find_curve
from wan_core.sampling.cache.skipping import leave_out
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.plan import make_plan

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
LAYERS = 8
# wide enough for copies and products to take time beside each other: 25 MB a block
MIDDLE = DiTConfig(
    in_channels=16, out_channels=16, dim=1024, ffn_dim=4096, num_heads=8, num_layers=LAYERS, text_dim=48, text_len=32
)
HANGS = 100  # seconds: longer than any of these tests takes
PRECISIONS = ("bf16", "fp8", "fp8-weights", "te-current", "te-delayed")
SKIPPING = {
    "all steps": None,
    "magcache": SkipOptions(magcache=MagCacheOptions(threshold=10, max_skips=2, retention=0.2)),
    "taylorseer": SkipOptions(taylorseer=TaylorSeerOptions(interval=2)),
}


@pytest.fixture(autouse=True)
def shows_where_it_hangs(capfd):
    """All threads' stacks on the terminal: copies, locks and threads wait for one another here."""
    with capfd.disabled():
        terminal = os.dup(2)
    faulthandler.dump_traceback_later(HANGS, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.close(terminal)


def quantization_of(precision: str):
    if precision == "bf16":
        return None
    reason = SCHEMES[precision].why_not(CUDA)
    if reason is not None:
        pytest.skip(reason)
    return find_quantization(precision, CUDA)


def experts(precision: str, device, compile: str = "off"):
    quantization, attend = quantization_of(precision), resolve_attention("sdpa", CUDA)[1]
    models = {}
    for seed, name in enumerate(("high", "low")):
        model = random_module(
            MIDDLE, device=device, dtype=torch.bfloat16, seed=seed, quantization=quantization, draw_on=CUDA
        )
        models[name] = optimize(model, attend=attend, compile=compile, device=CUDA)
    return models


def streaming(precision: str, resident: int | None, compile: str = "off") -> Residency:
    residency = Residency(CUDA, "swap" if resident is None else "stream", resident_blocks=resident or 0)
    for name, model in experts(precision, "cpu", compile).items():
        residency.add(name, model)
    return residency


run = partial(run_experts, device=CUDA, dtype=torch.bfloat16, latents=(5, 32, 32))


@pytest.mark.parametrize("skipping", SKIPPING)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_streamed_is_resident_bit_for_bit(precision, skipping):
    plan = make_plan(steps=12)
    if SKIPPING[skipping] is not None:
        plan = leave_out(plan, SKIPPING[skipping], find_curve(None, "t2v-A14B"))
    plain, residency = experts(precision, CUDA), streaming(precision, None)  # locking memory takes the time here
    exacts = {batched: run(plain.__getitem__, plan, batched=batched) for batched in (False, True)}
    for resident in (None, 0, 3, 5):
        residency.follow("swap" if resident is None else "stream", resident or 0, None, {})
        for batched, exact in exacts.items():
            for _ in range(2):
                ours = run(residency.use, plan, batched=batched)
                assert torch.equal(ours, exact), (resident, batched)


@pytest.mark.parametrize("share", [0.0, 0.4])
def test_weights_in_their_files_are_resident_ones_bit_for_bit(tmp_path, share):
    """All of them, or what is not pinned; twice, from expert to expert, and after they left the device."""
    plan, plain = make_plan(steps=12), experts("bf16", CUDA)
    exact = run(plain.__getitem__, plan)
    residency, attend = Residency(CUDA, "swap"), resolve_attention("sdpa", CUDA)[1]
    for name, model in plain.items():
        save(model, tmp_path / f"{name}.safetensors")
        mapped = load_dit(tmp_path / f"{name}.safetensors", dtype=torch.bfloat16, how=Reading(stays=True))
        mapped = optimize(mapped, attend=attend, device=CUDA)
        size = sum(parameter.nbytes for parameter in mapped.parameters())
        residency.add(name, mapped, Waits(False, int(share * size)))
        assert residency.host_weights[name].bytes_in_files > 0.9 * (1 - share - 1 / LAYERS) * size
    for resident in (None, 0, 3, 5):
        residency.follow("swap" if resident is None else "stream", resident or 0, None, {})
        for _ in range(2):
            assert torch.equal(run(residency.use, plan), exact), resident
        residency.use("high")  # what is being read ends with its memory
        residency.release("high")
        assert torch.equal(run(residency.use, plan), exact), resident


@pytest.mark.parametrize("resident", [None, 2])
def test_nobody_waits(resident):
    """`set_sync_debug_mode("error")` raises at a call that blocks the host on the device."""
    residency, plan = streaming("bf16", resident), make_plan(steps=6)
    exact = run(residency.use, plan)
    seen = []

    def on_step(progress):
        seen.append(progress.step.index)
        if len(seen) == len(plan.steps):
            torch.cuda.set_sync_debug_mode("default")

    text = [draw_noise(n, (1, 5, 48)).to(CUDA, torch.bfloat16) for n in (1, 2)]
    noise = draw_noise(7, (1, 16, 5, 32, 32)).to(CUDA)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            result = denoise(
                plan, residency.use, Conditioning(cond=text[0], uncond=text[1]), noise,
                on_step=on_step,
            )  # fmt: skip
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(result, exact)


def test_memory_on_the_device_is_what_the_stage_says():
    residency = streaming("bf16", 2)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    residency.use("high")
    assert torch.cuda.memory_allocated() - before == pytest.approx(residency.weights_on_device(), rel=0.01)
    residency.release("high")
    assert torch.cuda.memory_allocated() - before < 1 << 20


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_staged_loading_is_the_plain_path_bit_for_bit(precision, tmp_path, monkeypatch):
    monkeypatch.setattr("wan_core.checkpoint.staged.PIECE", 1 << 20)
    few = replace(MIDDLE, num_layers=2)
    save(random_module(few, device="cpu", dtype=torch.float32, draw_on=CUDA), tmp_path / "a.safetensors")
    quantization = quantization_of(precision)
    for dtype in (torch.bfloat16,) if quantization else (torch.bfloat16, torch.float32):
        states = []
        for how in (Reading(staged=False), Reading(mapped=False), Reading(threads=3)):
            options = {"dtype": dtype, "quantization": quantization, "how": how}
            model = load_dit(tmp_path / "a.safetensors", device=CUDA, **options)
            states.append(model.state_dict())
        for other in states[1:]:
            assert set(other) == set(states[0])
            for name, value in states[0].items():
                assert value.is_cuda and torch.equal(value.view(torch.uint8), other[name].view(torch.uint8)), name


def test_out_of_memory_goes_on():
    """A hard limit below what all-resident takes: the run finishes by a cheaper plan, with the same latents."""
    code = """
import torch
from wan_core.config import LoadOptions, Request
from wan_core.pipeline.pipeline import Pipeline
request = Request(prompt="a red circle moving right on a blue background", steps=4, seed=3)
pipe = Pipeline.load(LoadOptions(model="tiny", device="cuda", residency="resident"))
exact = pipe.generate(request).latents
failed = []
def fail(*_):
    if not failed:
        failed.append(1)
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
pipe.models.residency.models["low"].blocks[2].self_attn.o.register_forward_pre_hook(fail)
result = pipe.generate(request)
assert failed and torch.equal(result.latents, exact), "differs"
assert any("out of memory, going on" in note for note in result.report.notes)
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "went on" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize("policy", ["resident", "swap", "stream"])
def test_tasks_that_take_turns_hold_memory_flat(policy, tmp_path):
    on_device, on_host, graphs = growth(CUDA, policy, 12, tmp_path)
    assert on_device < 2 << 20 and on_host < 64 << 20 and graphs == 0

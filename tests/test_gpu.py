"""On an NVIDIA GPU: the same results as the CPU, whatever the kernel, the precision or where the weights live."""

from __future__ import annotations

import pytest
import torch

from wan_core.attention.registry import BACKENDS, resolve_attention
from wan_core.config import LoadOptions, Request
from wan_core.doctor import TOLERANCE, self_test
from wan_core.metrics import judge, psnr
from wan_core.pipeline import Pipeline

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
CAPTION = "a green square moving left on a white background"


def video(**options):
    request = options.pop("request", Request(prompt=CAPTION, seed=5))
    result = Pipeline.load(LoadOptions(model="tiny", **options)).generate(request)
    return torch.from_numpy(result.frames), result


@pytest.mark.parametrize("name", [n for n in BACKENDS if n != "math"])
def test_attention_backend_matches_the_formula(name):
    assert self_test(resolve_attention(name, CUDA)[1], CUDA) <= TOLERANCE


def test_fp32_on_the_gpu_is_the_cpu_result():
    cpu, _ = video(device="cpu", precision="fp32")
    gpu, _ = video(device="cuda", precision="fp32", vae_precision="fp32", attention="sdpa")
    assert psnr(cpu, gpu) > 45


def test_bf16_keeps_the_caption():
    full, _ = video(device="cuda", precision="fp32")
    half, _ = video(device="cuda", precision="bf16")
    assert psnr(full, half) > 25
    assert judge(half, CAPTION).all_true


def test_swapping_models_changes_nothing_but_memory():
    resident, first = video(device="cuda", residency="resident")
    swapped, second = video(device="cuda", residency="swap")
    assert torch.equal(resident, swapped)
    assert {"fetch high", "fetch low"} <= second.report.phases.keys()
    assert second.report.phases["decode"].peak < first.report.phases["decode"].peak


def test_repeated_runs_hold_memory_flat_and_agree():
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cuda"))
    first = pipe.generate(Request(prompt=CAPTION, seed=5)).frames
    held = torch.cuda.memory_allocated()
    for seed in range(4):
        pipe.generate(Request(prompt=CAPTION, seed=seed))
    again = pipe.generate(Request(prompt=CAPTION, seed=5)).frames
    assert (first == again).all()
    assert torch.cuda.memory_allocated() - held < 1 << 20


def test_the_loop_never_waits_for_the_device():
    """`set_sync_debug_mode("error")` raises at any call that blocks the host on the device."""
    from wan_core.conditioning import draw_noise
    from wan_core.denoise import denoise

    pipe = Pipeline.load(LoadOptions(model="tiny", device="cuda", residency="resident"))
    job = pipe.prepare(Request(prompt=CAPTION))
    conditioning = pipe.encode(job)
    noise = draw_noise(0, job.latent_shape).to(CUDA)
    steps = []

    def on_step(progress):
        steps.append(progress.step.index)
        torch.cuda.set_sync_debug_mode("default" if len(steps) == progress.total else "error")

    try:
        with torch.no_grad():
            denoise(job.plan, pipe.models.expert, conditioning, noise, on_step=on_step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(steps) == 20

"""On an NVIDIA GPU: the same results as the CPU, whatever the kernel, the precision or where the weights live."""

from __future__ import annotations

import pytest
import torch

from wan_core.checkpoint import load_vae
from wan_core.cli.doctor import examine
from wan_core.config import LoadOptions, Request
from wan_core.execution.memory.residency import Residency
from wan_core.ops.kernels.fused import missing_triton
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.pipeline.embedded import parse_caption
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.sources import TINY
from wan_lab.metrics import judge, psnr
from wan_lab.shapes import draw

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
CAPTION = "a green square moving left on a white background"


def video(**options):
    request = options.pop("request", Request(prompt=CAPTION, seed=5))
    result = Pipeline.load(LoadOptions(model="tiny", **options)).generate(request)
    return torch.from_numpy(result.frames), result


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


def test_swapping_leaves_one_model_on_the_gpu_and_keeps_the_host_copy():
    residency = Residency(CUDA, "swap")
    models = {name: torch.nn.Linear(3, 3) for name in ("a", "b")}
    for name, model in models.items():
        residency.add(name, model)
    pointers = {name: model.weight.data_ptr() for name, model in models.items()}
    for name in ("a", "b", "a"):
        residency.use(name)
        assert [n for n, m in models.items() if m.weight.is_cuda] == [name]
    residency.release("a")
    assert {name: model.weight.data_ptr() for name, model in models.items()} == pointers


def test_the_doctor_passes_every_precision_and_kernel_that_can_run_here():
    found = examine("cuda")
    for name, scheme in SCHEMES.items():
        assert found["precisions"][name]["usable"] == (scheme.why_not(CUDA) is None), found["precisions"][name]
    assert found["kernels"]["usable"] == (missing_triton() is None), found["kernels"]["why_not"]


def test_vae_in_bf16_is_close_to_fp32():
    """What `--vae-precision auto` gives up on a GPU, on a drawn clip: both far above the VAE's own loss."""
    clip = draw([parse_caption(CAPTION)], seed=0).to(CUDA)
    exact = load_vae(TINY / "vae.safetensors", device=CUDA, dtype=torch.float32)
    rounded = load_vae(TINY / "vae.safetensors", device=CUDA, dtype=torch.bfloat16)
    with torch.no_grad():
        latents = exact.encode(clip)
        decoded = psnr(*(v.decode(latents)[0].permute(1, 2, 3, 0).float() / 2 + 0.5 for v in (exact, rounded)))
        error = float((rounded.encode(clip).float() - latents).norm() / latents.norm())
    print(f"bf16 VAE: decode {decoded:.1f} dB, encode relative error {error:.4f}")
    assert decoded > 40 and error < 0.02


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
    from wan_core.sampling.conditioning import draw_noise
    from wan_core.sampling.denoise import denoise

    pipe = Pipeline.load(LoadOptions(model="tiny", device="cuda", residency="resident"))
    job = pipe.prepare(Request(prompt=CAPTION))
    conditioning = pipe.encode(job)
    noise = draw_noise(0, job.latent_shape).to(CUDA)
    steps = []

    def on_step(progress):
        steps.append(progress.step.index)
        if len(steps) == progress.total:
            torch.cuda.set_sync_debug_mode("default")  # what follows the loop may wait

    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            denoise(job.plan, pipe.models.expert, conditioning, noise, on_step=on_step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(steps) == 20

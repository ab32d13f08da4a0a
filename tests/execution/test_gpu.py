"""On an NVIDIA GPU: the same videos as on the CPU, whatever the precision or guidance or where the weights live."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.denoised import denoise
from wan_core.checkpoint import load_vae
from wan_core.cli.doctor import examine
from wan_core.config import LoadOptions, NagOptions, Request
from wan_core.execution.memory.residency import Residency
from wan_core.ops.kernels.fused import missing_triton
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.pipeline.embedded import parse_caption
from wan_core.pipeline.pipeline import Pipeline, Result
from wan_core.pipeline.sources import TINY
from wan_core.sampling.conditioning import draw_noise
from wan_lab.metrics import judge, psnr
from wan_lab.shapes import draw

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
CAPTION = "a green square moving left on a white background"
PLAIN = Request(prompt=CAPTION, seed=5)
NAG = replace(
    PLAIN, negative_prompt="a red circle moving right on a blue background", preset="4-step", nag=NagOptions()
)
# One expert has guidance, the other normalized attention guidance.
MIXED = replace(NAG, preset="none", steps=12, guidance_high=3.0, guidance_low=1.0)
FP32 = {"precision": "fp32", "vae_precision": "fp32", "attention": "sdpa"}


@cache
def make(request: Request, device: str = "cuda", **options: str) -> Result:
    return Pipeline.load(LoadOptions(model="tiny", device=device, **options)).generate(request)


def frames(request: Request, device: str = "cuda", **options: str) -> torch.Tensor:
    return torch.from_numpy(make(request, device, **options).frames)


@pytest.mark.parametrize(("request_", "decibels"), [(PLAIN, 45), (NAG, 45), (MIXED, 40)], ids=["plain", "nag", "mixed"])
def test_fp32_on_the_gpu_is_the_cpu_result(request_, decibels):
    assert psnr(frames(request_, "cpu", precision="fp32"), frames(request_, **FP32)) > decibels


@pytest.mark.parametrize("residency", ["resident", "swap", "stream"])
@pytest.mark.parametrize("compile", ["off", "blocks"])
def test_it_is_the_same_compiled_and_wherever_weights_are(residency, compile):
    assert psnr(frames(NAG, **FP32), frames(NAG, **FP32, residency=residency, compile=compile)) > 45
    exact = frames(PLAIN, residency="resident", compile=compile)
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cuda", residency=residency, compile=compile), request=PLAIN)
    for _ in range(2):
        assert torch.equal(torch.from_numpy(pipe.generate(PLAIN).frames), exact)


def test_bf16_keeps_the_caption():
    full, half = frames(PLAIN, precision="fp32"), frames(PLAIN, precision="bf16")
    assert psnr(full, half) > 25
    assert judge(half, CAPTION).all_true
    assert psnr(frames(NAG, **FP32), frames(replace(NAG, nag=None), **FP32)) < 40


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
    report = examine("cuda")
    for name, scheme in SCHEMES.items():
        assert report["precisions"][name]["usable"] == (scheme.why_not(CUDA) is None), report["precisions"][name]
    assert report["kernels"]["usable"] == (missing_triton() is None), report["kernels"]["why_not"]


def test_vae_in_bf16_is_close_to_fp32():
    """What `--vae-precision auto` gives up on a GPU, on a drawn clip: both far above the VAE's own loss."""
    clip = draw([parse_caption(CAPTION)], seed=0).to(CUDA)
    exact = load_vae(TINY / "vae.safetensors", device=CUDA, dtype=torch.float32)
    rounded = load_vae(TINY / "vae.safetensors", device=CUDA, dtype=torch.bfloat16)
    with torch.no_grad():
        latents = exact.encode(clip)
        decoded = psnr(*(v.decode(latents)[0].permute(1, 2, 3, 0).float() / 2 + 0.5 for v in (exact, rounded)))
        error = float((rounded.encode(clip).float() - latents).norm() / latents.norm())
    assert decoded > 40 and error < 0.02


def test_the_loop_never_waits_for_the_device():
    """`set_sync_debug_mode("error")` raises at any call that blocks the host on the device."""
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cuda", residency="resident"))
    run = pipe.prepare(Request(prompt=CAPTION))
    conditioning = pipe.encode(run)
    noise = draw_noise(0, run.job.plan.latent_shape).to(CUDA)
    steps = []

    def on_step(progress):
        steps.append(progress.step.index)
        if len(steps) == progress.total:
            torch.cuda.set_sync_debug_mode("default")  # what follows the loop may wait

    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            denoise(run.job.plan, pipe.models.expert, conditioning, noise, on_step=on_step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(steps) == 20

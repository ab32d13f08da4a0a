"""Normalized attention guidance on a GPU: compiled, in CUDA graphs, streamed and in bf16, as on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from wan_core.config import LoadOptions, NagOptions, Request
from wan_core.models.wan.layers import nag
from wan_core.pipeline.pipeline import Pipeline
from wan_lab.metrics import psnr

pytestmark = pytest.mark.gpu
REQUEST = Request(
    prompt="a green square moving left on a white background",
    negative_prompt="a red circle moving right on a blue background",
    seed=5,
    preset="4-step",
    nag=NagOptions(),
)


def video(request: Request = REQUEST, **options: object) -> torch.Tensor:
    given = {"model": "tiny", "precision": "fp32", "vae_precision": "fp32", "attention": "sdpa", **options}
    return torch.from_numpy(Pipeline.load(LoadOptions(**given)).generate(request).frames)  # type: ignore[arg-type]


def test_a_run_is_that_of_the_cpu() -> None:
    """At these sizes blocks are replayed as CUDA graphs."""
    cpu, gpu = video(device="cpu", attention="auto"), video(device="cuda")
    assert psnr(cpu, gpu) > 45 and psnr(gpu, video(replace(REQUEST, nag=None), device="cuda")) < 40


@pytest.mark.parametrize("options", [{"compile": "blocks"}, {"residency": "stream"}, {"residency": "swap"}])
def test_it_is_the_same_compiled_and_wherever_weights_are(options: dict[str, str]) -> None:
    assert psnr(video(device="cuda"), video(device="cuda", **options)) > 45


def test_steps_with_and_without_guidance_in_one_phase() -> None:
    """Their graphs have one prompt in common, and are not the same."""
    from wan_core.config import GuidanceOptions, SkipOptions

    skip = SkipOptions(guidance=GuidanceOptions(low=0.3, high=0.8))
    mixed = replace(REQUEST, preset="none", steps=12, guidance_high=3.0, guidance_low=3.0, skip=skip)
    assert psnr(video(mixed, device="cpu", attention="auto"), video(mixed, device="cuda")) > 40


def test_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """Of cross-attention's output at 640x640 with 81 frames, 33,600 tokens of A14B: a few milliseconds a block."""
    positive, negative = (torch.randn(1, 33600, 5120, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    numbers = torch.tensor([11.0, 2.5, 0.25], device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    nag(positive, negative, numbers)
    begin.record()
    for _ in range(5):
        nag(positive, negative, numbers)
    end.record()
    torch.cuda.synchronize()
    with capsys.disabled():
        print(f"\nNAG, 33,600 x 5,120 in bf16: {begin.elapsed_time(end) / 5:.2f} ms, eager")
    assert begin.elapsed_time(end) / 5 < 50

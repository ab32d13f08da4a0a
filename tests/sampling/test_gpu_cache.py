"""Leaving forwards out, on an NVIDIA GPU: bit-identical where nothing is skipped, no waiting, memory as it was said."""

from __future__ import annotations

import pytest
import torch

from tests.denoised import denoise
from tests.sampling.test_denoise import small_dit
from wan_core.config import (
    MagCacheOptions,
    SkipOptions,
    TaylorSeerOptions,
)
from wan_core.execution.optimize import optimize
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.registry import resolve_attention
from wan_core.sampling.cache.curves import find_curve
from wan_core.sampling.cache.skipping import leave_out
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.plan import make_plan

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
CURVE = find_curve(None, "t2v-A14B")
MAG = MagCacheOptions(threshold=0.24, max_skips=2, retention=0.1)
SETTINGS = {
    "magcache": SkipOptions(magcache=MAG),
    "taylorseer": SkipOptions(taylorseer=TaylorSeerOptions(interval=2)),
}


def expert_models(compile: str = "off") -> dict[str, WanModel]:
    """Two small experts as they ship: what `optimize` puts around the blocks is beneath the cache."""
    attend = resolve_attention("sdpa", CUDA)[1]
    models = {name: small_dit(seed=n).to(CUDA, torch.bfloat16) for n, name in enumerate(("high", "low"))}
    for model in models.values():
        optimize(model, attend=attend, compile=compile, device=CUDA)
    return models


@pytest.fixture(scope="module")
def experts() -> dict[str, WanModel]:
    return expert_models()


@pytest.fixture(scope="module")
def launched() -> dict[str, WanModel]:
    return expert_models()


def run(plan, experts, batched=False, on_step=None):
    noise = draw_noise(7, (1, 16, 3, 8, 12)).to(CUDA)
    text = [draw_noise(n, (1, 5, 12)).to(CUDA, torch.bfloat16) for n in (1, 2)]
    with torch.no_grad():
        conditioning = Conditioning(cond=text[0], uncond=text[1])
        return denoise(plan, experts.__getitem__, conditioning, noise, batched=batched, on_step=on_step)


@pytest.mark.parametrize("compile", ["off", "blocks"])
@pytest.mark.parametrize("batched", [False, True])
def test_a_cache_that_never_skips_is_bit_identical_to_none(batched, compile):
    models = expert_models(compile)
    plan = make_plan(steps=20)
    exact = run(plan, models, batched)
    for options in (
        SkipOptions(magcache=MagCacheOptions(threshold=0, max_skips=2, retention=0.2)),
        SkipOptions(taylorseer=TaylorSeerOptions(interval=1)),
    ):
        assert torch.equal(run(leave_out(plan, options, CURVE), models, batched), exact)
    seen: list[list[torch.Tensor]] = [[], []]
    skipping = leave_out(plan, SETTINGS["magcache"], CURVE)
    first = next(step.index for step in skipping.steps if step.skipped)
    run(plan, models, batched, lambda progress: seen[0].append(progress.latents))
    run(skipping, models, batched, lambda progress: seen[1].append(progress.latents))
    assert [torch.equal(a, b) for a, b in zip(*seen, strict=True)] == [n < first for n in range(20)]


@pytest.mark.parametrize("name", SETTINGS)
def test_the_loop_never_waits_for_the_device(launched, name):
    """`set_sync_debug_mode("error")` raises at a call that blocks the host on the device, but for an event's
    `synchronize`."""
    plan = leave_out(make_plan(steps=20), SETTINGS[name], CURVE)
    exact, steps = run(plan, launched), []

    def on_step(progress):
        steps.append(progress.forwards)
        if len(steps) == len(plan.steps):
            torch.cuda.set_sync_debug_mode("default")  # what follows the loop may wait

    noise = draw_noise(7, (1, 16, 3, 8, 12)).to(CUDA)
    text = [draw_noise(n, (1, 5, 12)).to(CUDA, torch.bfloat16) for n in (1, 2)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            conditioning = Conditioning(cond=text[0], uncond=text[1])
            result = denoise(plan, launched.__getitem__, conditioning, noise, on_step=on_step)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(result, exact) and sum(steps) < 40

"""On a GPU: the host stays a few blocks ahead, an interruption ends the work within them, and nothing is slower."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import pytest
import torch

from tests.denoised import denoise
from wan_core.checkpoint.random import random_module
from wan_core.execution.optimize import optimize
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.registry import resolve_attention
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.denoise import BLOCKS_AHEAD
from wan_core.sampling.plan import make_plan

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
LAYERS = 10  # a quarter of A14B
ALONE = 0.25  # seconds of a block on a card that computes nothing else, with all kernels
A14B = DiTConfig(in_channels=16, out_channels=16, dim=5120, ffn_dim=13824, num_heads=40, num_layers=LAYERS)
SHAPE = (1, 16, 21, 90, 160)  # 1280x720, 81 frames


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def model() -> WanModel:
    module = random_module(A14B, device=CUDA, dtype=torch.bfloat16, seed=0)
    assert isinstance(module, WanModel)
    return optimize(module, attend=resolve_attention("auto", CUDA, torch.bfloat16, A14B.head_dim)[1])


def run(model: WanModel, steps: int, on_block: Callable[[], None] | None) -> float:
    """Seconds until the device has nothing left to do."""
    plan = make_plan(steps=steps, guidance_high=1, guidance_low=1, boundary=0)
    text, noise = draw_noise(1, (1, 5, A14B.text_dim)).to(CUDA, torch.bfloat16), draw_noise(7, SHAPE).to(CUDA)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    with torch.no_grad():
        denoise(plan, lambda _: model, Conditioning(cond=text), noise, on_block=on_block)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def test_an_interruption_takes_the_blocks_ahead(model: WanModel) -> None:
    run(model, 1, None)  # compiles kernels
    block = run(model, 2, None) / (2 * LAYERS)
    launched, stopped = 0, 0.0

    def stop() -> None:
        nonlocal launched, stopped
        launched += 1
        if launched == 15:
            stopped = time.perf_counter()
            raise Stop

    with pytest.raises(Stop):
        run(model, 4, stop)
    torch.cuda.synchronize()
    took = time.perf_counter() - stopped
    times = f"{took:.2f} s, a block takes {block:.3f} s"
    assert took < (BLOCKS_AHEAD + 1) * block, times
    assert took < 1 or block > ALONE, times


@pytest.mark.alone
def test_pacing_costs_nothing(model: WanModel) -> None:
    """In turns, the median of five each: single runs differ by as much as the card's temperature changes."""
    for _ in range(2):
        run(model, 2, None)  # until the card is warm
    free, paced = [], []
    for _ in range(5):
        free.append(run(model, 2, None))
        paced.append(run(model, 2, lambda: None))
    assert median(paced) < 1.005 * median(free), f"{median(paced):.3f} s with, {median(free):.3f} s without"

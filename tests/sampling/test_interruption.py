"""Interruption between blocks: at every block of a run, and then the next run is that of a fresh model, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.denoised import denoise
from tests.streamed_experts import LAYERS, experts, streaming
from wan_core.config import MagCacheOptions, SparseOptions, TaylorSeerOptions
from wan_core.execution.optimize import begin_run
from wan_core.models.wan.model import WanModel
from wan_core.ops.quant.swap import Quantization
from wan_core.ops.quant.transformer_engine import TEDelayedLinear
from wan_core.sampling.cache.curves import find_curve
from wan_core.sampling.cache.magcache import skip_magcache
from wan_core.sampling.cache.policies import skip_taylorseer
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.plan import Plan, make_plan
from wan_core.sampling.sparsity.schedule import sparsify

CPU = torch.device("cpu")
CURVE = find_curve(None, "t2v-A14B")
assert CURVE is not None
FULL, FIVE = make_plan(steps=3), make_plan(steps=5)  # the fewest at which each does what it is here for
PLANS = {
    "full": FULL,
    "taylorseer": skip_taylorseer(FIVE, TaylorSeerOptions(interval=2, retention=0.1)),
    "magcache": skip_magcache(FIVE, MagCacheOptions(threshold=0.5, max_skips=2, retention=0.1), CURVE),
    "sparse": sparsify(make_plan(steps=2), SparseOptions.parse("0.5:ramp0")),
}
CACHES = ("taylorseer", "magcache")


class Stop(Exception):
    pass


class Stopper:
    """Raises at the block number `at`, counted from 0 over the whole run."""

    def __init__(self, at: int | None = None) -> None:
        self.at, self.blocks = at, 0

    def __call__(self) -> None:
        self.blocks += 1
        if self.at is not None and self.blocks > self.at:
            raise Stop


def run(
    use: Callable[[str], WanModel],
    plan: Plan,
    on_block: Callable[[], None] | None,
    *,
    batched: bool = False,
) -> Tensor:
    def acquire(name: str) -> WanModel:
        model = use(name)
        begin_run(model)
        return model

    text = [draw_noise(n, (1, 5, 48)) for n in (1, 2)]
    conditioning, noise = Conditioning(cond=text[0], uncond=text[1]), draw_noise(7, (1, 16, 2, 4, 6))
    with torch.no_grad():
        return denoise(plan, acquire, conditioning, noise, batched=batched, on_block=on_block)


@pytest.mark.parametrize(
    ("name", "resident", "batched"),
    [
        ("full", 1, False),
        ("full", None, True),
        ("taylorseer", 1, False),
        ("magcache", None, True),
        ("sparse", 1, False),
    ],
)
def test_at_every_block(name: str, resident: int | None, batched: bool) -> None:
    plan, residency, counted = PLANS[name], streaming(None, resident), Stopper()
    exact = run(experts().__getitem__, plan, counted, batched=batched)
    assert torch.equal(exact, run(experts().__getitem__, plan, None, batched=batched))
    everything = len(plan.steps) * (1 if batched else 2) * LAYERS
    assert counted.blocks % LAYERS == 0 and (counted.blocks < everything) == (name in CACHES)
    for at in range(counted.blocks):
        stop = Stopper(at)
        with pytest.raises(Stop):
            run(residency.use, plan, stop, batched=batched)
        assert stop.blocks == at + 1, "it ran on after the block"
        for model in residency.models.values():
            assert isinstance(model, WanModel)
            assert [runner.name for runner in model.runners.runners] == []
        if at % 9 == 0 or at > counted.blocks - 3:
            again = run(residency.use, plan, Stopper(), batched=batched)
            assert torch.equal(again, exact), at


def test_delayed_scales() -> None:
    """Scales that follow what was seen: an interrupted forward leaves nothing of them."""
    quantization = Quantization(TEDelayedLinear, CPU)
    residency, exact = streaming(quantization, 2), run(experts(quantization).__getitem__, FULL, None)
    for at in range(0, len(FULL.steps) * 2 * LAYERS, 7):
        with pytest.raises(Stop):
            run(residency.use, FULL, Stopper(at))
        assert torch.equal(run(residency.use, FULL, None), exact)

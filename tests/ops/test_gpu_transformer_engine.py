"""The Transformer Engine linears on a GPU: every recipe against float64, its state, and what it costs in memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tensors import draw, relative
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.formats import Quantized, spread_scale
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.ops.quant.transformer_engine import DelayedState, TEBlockLinear, TECurrentLinear, TEDelayedLinear

CUDA = torch.device("cuda", 0)
TOLERANCE = 0.04
RECIPES = {"te-delayed": TEDelayedLinear, "te-current": TECurrentLinear, "te-block": TEBlockLinear}

pytestmark = [pytest.mark.gpu]


@pytest.fixture(params=RECIPES)
def kind(request):
    reason = SCHEMES[request.param].why_not(CUDA)
    if reason is not None:
        pytest.skip(reason)
    return RECIPES[request.param]


@pytest.fixture
def delayed():
    reason = SCHEMES["te-delayed"].why_not(CUDA)
    if reason is not None:
        pytest.skip(reason)
    layer, weight = linear(TEDelayedLinear, 1024, 512)
    layer.bias.zero_()
    return layer, DelayedState([layer], CUDA), weight


def random(*shape: int, seed: int = 1) -> Tensor:
    return draw(*shape, seed=seed, device=CUDA, dtype=torch.bfloat16)


def linear(kind, k: int, n: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16):
    """A linear and the weight that it was made of, [N, K]."""
    weight, layer = random(n, k, seed=seed) * k**-0.5, kind(k, n, dtype=dtype)
    layer.load({**kind.encode(weight), "bias": random(n, seed=seed).to(dtype)})
    if kind is TEDelayedLinear:
        DelayedState([layer], CUDA)
    return layer, weight


def error(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> float:
    """Relative, against float64."""
    return relative(out, x.double() @ weight.double().T + bias)


@pytest.mark.parametrize(("k", "n"), [(5120, 5120), (13824, 5120), (5120, 13824)])
@pytest.mark.parametrize("outliers", [1, 60])
def test_close_to_float64(kind, k, n, outliers):
    layer, weight = linear(kind, k, n)
    layer.bias.zero_()
    x = random(2048, k)
    x[:, :: k // 8] *= outliers
    assert error(layer(x), x, weight) <= TOLERANCE


def test_the_product_is_that_of_the_numbers_stored(kind):
    """The rounding to FP8 apart, nothing is lost: a scale in the wrong place would be."""
    layer, _ = linear(kind, 1024, 512)
    layer.bias.zero_()
    x = random(256, 1024) * torch.logspace(-2, 2, 1024, device=CUDA)
    quantized = layer.quantize(x * torch.logspace(-2, 2, 256, device=CUDA)[:, None])
    stored = Quantized(layer.weight, spread_scale(layer.weight_scale, layer.weight.shape)).dequantize(torch.float64)
    assert error(layer(quantized), quantized.dequantize(torch.float64), stored) < 3e-3


@pytest.mark.parametrize("rows", [1001, 1008])
def test_takes_what_the_fused_kernels_make(kind, rows):
    layer, weight = linear(kind, 1024, 512)
    x = random(1, rows, 1024)
    quantized = fused.quantize(x, layer.fmt or "tensor")
    assert error(layer(quantized), x, weight, layer.bias.double()) <= TOLERANCE
    with pytest.raises(ValueError, match="this recipe multiplies"):
        layer(fused.quantize(x, "row"))


def test_delayed_scales_fit_after_every_shift(delayed):
    layer, state, weight = delayed
    x, slot = random(2048, 1024), state.slots[0]
    for factor in (1, 1 / 3, 1, 1 / 9, 1):  # within the history: no forward is off
        assert error(layer(x * factor), x * factor, weight) <= TOLERANCE
        assert slot.amax.item() == (x * factor).abs().max().item()
        state.update()
    for factor in (3, 9):  # beyond it: one forward saturates
        assert layer(x * factor).isfinite().all()
        state.update()
        assert error(layer(x * factor), x * factor, weight) <= TOLERANCE
        state.update()
    assert slot.scale.item() == pytest.approx(448 / (x * 9).abs().max().item())
    huge = layer.quantize(x * 1e30)
    assert huge.data.float().abs().max() == 448 and layer(huge).isfinite().all()


def test_delayed_never_waits_for_the_device(delayed):
    layer, state, _ = delayed
    x = random(64, 1024)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            layer(x)
            state.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_whole_and_once(kind):
    class Block(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.q, self.k, self.o = (linear(kind, 256, 256, seed + i)[0] for i in range(3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.q.quantize(F.layer_norm(x, x.shape[-1:]))
            return x + self.o(self.q(h) + self.k(h))

    torch._dynamo.reset()
    blocks = nn.ModuleList(Block(seed) for seed in (0, 10))
    state = DelayedState.install(blocks, CUDA)
    compiled = torch.compile(Block.forward, fullgraph=True, dynamic=True)
    with torch.no_grad():
        compiled(blocks[0], random(1, 1000, 256))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows in (1000, 77, 1512):
                for block in blocks:
                    x = random(1, rows, 256)
                    out, wanted = compiled(block, x), block(x)
                    assert ((out - wanted).norm() / wanted.norm()).item() < 0.02
                if state is not None:
                    state.update()
    if state is not None:
        assert {slot.used.item() for slot in (b.slot for block in blocks for b in (block.q, block.o))} == {True}
        assert (state.history > 0).sum().item() == 3 * 4

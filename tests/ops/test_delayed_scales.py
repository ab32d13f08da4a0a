"""Delayed scales of FP8: what they are, and what leaves them alone."""

from __future__ import annotations

import math
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.ops.test_transformer_engine import CPU, exact, linear
from tests.tensors import draw, relative
from wan_core.checkpoint.random import random_module
from wan_core.execution.optimize import DelayedScales, optimize
from wan_core.models.wan.config import DiTConfig
from wan_core.ops.attention.sdpa import SDPA
from wan_core.ops.kernels.formats import FP8_MAX
from wan_core.ops.quant import transformer_engine as te
from wan_core.ops.quant.swap import Quantization
from wan_core.ops.quant.transformer_engine import (
    HISTORY,
    DelayedState,
    TEDelayedLinear,
    next_scales,
)


class Model(nn.Module):
    """Two delayed linears, one after the other, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = (linear(TEDelayedLinear, 128, 128, seed) for seed in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


magnitudes = st.one_of(
    st.floats(2.0**-20, 2.0**20, width=32), st.sampled_from([0.0, math.inf, math.nan, 2.0**-140, 3e38])
)


@given(st.lists(st.tuples(magnitudes, magnitudes), min_size=1, max_size=40))
def test_scales_follow_the_largest_of_the_last_forwards_that_measured_something(forwards):
    history, scale = torch.zeros(HISTORY, 2), torch.tensor([7.0, 9.0])
    recent = [deque[float](maxlen=16), deque[float](maxlen=16)]
    for forward in forwards:
        history, scale = next_scales(history, torch.tensor(forward), scale)
        for i, amax in enumerate(forward):
            if math.isfinite(amax) and amax > 0:
                recent[i].append(amax)
            wanted = FP8_MAX / max(recent[i]) if recent[i] else (7.0, 9.0)[i]
            assert scale[i].item() == pytest.approx(min(wanted, torch.finfo(torch.float32).max), rel=1e-6)
    assert scale.isfinite().all()
    assert (scale > 0).all()


@given(st.integers(-18, 18), st.integers(0, 2**16))
def test_first_use_calibrates_on_its_own_input(exponent, seed):
    layer = linear(TEDelayedLinear)
    state = DelayedState([layer], CPU)
    x = draw(24, 256, seed=seed) * 2.0**exponent
    layer.bias.zero_()
    assert relative(layer(x), exact(layer, x)) < 0.04
    slot = state.slots[0]
    assert slot.scale.item() == pytest.approx(FP8_MAX / x.abs().max().item())
    assert slot.scale.item() != 1
    state.update()
    assert slot.scale.item() == pytest.approx(FP8_MAX / x.abs().max().item())
    assert slot.amax.item() == 0


def test_an_update_after_each_forward_makes_all_scales_once():
    model = Model()
    state = DelayedState.install(model, CPU)
    assert state is not None
    x = draw(16, 128)
    hidden = []
    model.second.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0].abs().max().item()))
    for factor in (1, 4, 2):
        model(x * factor)
        state.update()
    first, second, idle = state.slots
    assert first.scale.item() == pytest.approx(FP8_MAX / (4 * x.abs().max().item()), rel=1e-5)
    assert second.scale.item() == pytest.approx(FP8_MAX / max(hidden), rel=1e-5)
    assert (idle.scale.item(), idle.used.item()) == (0, False)
    assert (state.history > 0).sum(0).tolist() == [3, 3, 0]


@pytest.mark.parametrize("factor", [3.0, 1000.0, -1e30])
def test_numbers_beyond_the_history_saturate_for_one_forward(factor):
    layer = linear(TEDelayedLinear)
    layer.bias.zero_()
    state = DelayedState([layer], CPU)
    x = draw(32, 256)
    layer(x)
    state.update()
    grown = x * factor
    quantized = layer.quantize(grown)
    assert quantized.data.float().abs().max() == FP8_MAX
    assert quantized.dequantize().abs().max().item() == pytest.approx(x.abs().max().item())
    assert layer(quantized).isfinite().all()
    state.update()
    assert relative(layer(grown), exact(layer, grown)) < 0.04


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_leaves_no_trace(bad):
    layer = linear(TEDelayedLinear)
    state = DelayedState([layer], CPU)
    x = draw(8, 256)
    layer(x)
    state.update()
    before, history = state.slots[0].scale.item(), state.history.clone()
    layer(torch.full_like(x, bad))
    state.update()
    assert state.slots[0].scale.item() == before
    assert torch.equal(state.history, history)
    assert relative(layer(x), exact(layer, x)) < 0.04


@torch.no_grad()
def test_the_runner_updates_the_scales_after_every_forward_and_no_earlier():
    """A transformer with delayed linears: `optimize` installs their state and the runner, once."""
    config = DiTConfig(
        in_channels=16, out_channels=16, dim=96, ffn_dim=128, num_heads=2, num_layers=2, text_dim=48, text_len=12
    )
    model = random_module(config, device=CPU, dtype=torch.float32, quantization=Quantization(TEDelayedLinear, CPU))
    for _ in range(2):  # options may be applied again
        optimize(model, attend=SDPA)
    assert str(model.runners) == "delayed FP8 scales > blocks (resident weights)"
    runner = model.runners.find(DelayedScales)
    assert runner is not None
    updates: list[int] = []
    for block in model.blocks:
        block.ffn[2].register_forward_hook(lambda *_: updates.append(int((runner.state.history > 0).any(1).sum())))
    text = model.prepare_text(draw(1, 9, 48))  # what it measures enters the history with the first forward
    for _ in range(3):
        model(draw(1, 16, 3, 8, 8), torch.tensor([700.0]), text)
    assert updates == [0, 0, 1, 1, 2, 2]
    assert int((runner.state.history > 0).any(1).sum()) == 3


def test_compiled_once_for_all_blocks_and_lengths_and_the_state_moves():
    class Block(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.q, self.o = linear(TEDelayedLinear, 128, 128, seed), linear(TEDelayedLinear, 128, 128, seed + 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.o(self.q(self.q.quantize(x)))

    torch._dynamo.reset()
    blocks = nn.ModuleList(Block(seed) for seed in (0, 10, 20))
    state = DelayedState([m for m in blocks.modules() if isinstance(m, TEDelayedLinear)], CPU)
    compiled = torch.compile(Block.forward, fullgraph=True, dynamic=True, backend="aot_eager")
    inputs = [draw(1, rows, 128, seed=rows) for rows in (40, 56, 72)]
    with torch.no_grad():
        compiled(blocks[0], inputs[0])
        with torch._dynamo.config.patch(error_on_recompile=True):
            for x in inputs:
                for block in blocks:
                    assert relative(compiled(block, x), block(x).double()) < 1e-6
                state.update()
    assert (state.history > 0).sum(0).tolist() == [3] * 6
    assert all(slot.used and slot.scale > 0 for slot in state.slots)


@pytest.mark.parametrize("used", [False, True])
def test_the_op_declares_what_it_changes(used):
    """torch's own checks: schema against behaviour, fake shapes, tracing."""
    slot = te.Slot(torch.ones(1), torch.zeros(1), torch.tensor([used]))
    torch.library.opcheck(te._quantize_delayed, (draw(4, 256), *slot))

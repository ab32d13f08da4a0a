"""One compilation of each part of a block serves all blocks of both experts, whatever size, length and prompt."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._dynamo import config as dynamo
from torch._dynamo.backends.debugging import aot_eager

from wan_core.checkpoint.random import random_module
from wan_core.execution.optimize import _constant_floats, compilations, compile_blocks, optimize
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.layers import PLAIN_PARTS
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import ForwardInfo, Place
from wan_core.ops.attention.protocol import Attention, AttentionCall
from wan_core.ops.attention.sdpa import SDPA
from wan_core.ops.quant.fp8 import Fp8RowLinear
from wan_core.ops.quant.swap import Quantization

CPU = torch.device("cpu")
SMALL = DiTConfig(
    in_channels=16, out_channels=16, dim=128, ffn_dim=256, num_heads=2, num_layers=3, text_dim=48, text_len=32
)
# latent frames, rows, columns, and text rows of six videos
SIZES = ((5, 8, 8, 4), (5, 12, 8, 9), (3, 8, 14, 30), (9, 6, 6, 1), (2, 20, 4, 32), (7, 10, 10, 17))


def forward(model: WanModel, size: tuple[int, int, int, int]) -> torch.Tensor:
    T, Y, X, rows = size
    generator = torch.Generator().manual_seed(T)
    x = torch.randn(1, 16, T, Y, X, generator=generator)
    return model(x, torch.tensor([900.0]), torch.randn(1, rows, 48, generator=generator))


@torch.no_grad()
def test_six_sizes_and_two_experts_compile_once():
    """Also without a graph break, which `fullgraph` would raise. Dynamo decides what is compiled; the compiler behind
    it, left out here, does not."""
    torch.compiler.reset()
    fp8 = Quantization(Fp8RowLinear, CPU)
    experts = [random_module(SMALL, device=CPU, dtype=torch.float32, seed=seed, quantization=fp8) for seed in (0, 1)]
    eager = [[forward(model, size) for size in SIZES] for model in experts]
    for model in experts:
        compile_blocks(model, CPU, backend="aot_eager")
    before = compilations()
    for model, expected in zip(experts, eager, strict=True):
        for size, video in zip(SIZES, expected, strict=True):
            torch.testing.assert_close(forward(model, size), video, rtol=1e-4, atol=1e-4)
    assert compilations() - before == 2  # before and after attention


@torch.no_grad()
def test_a_block_is_traced_once():
    """Epsilons are constants: taken for numbers that change, as sizes do, they have all traced a second time. What
    others in this process want of the compiler stays as it was, also where a forward is interrupted."""
    torch.compiler.reset()
    seen = []

    def compiler(graph, inputs):
        seen.append(dynamo.specialize_float)
        return aot_eager(graph, inputs)

    model = random_module(SMALL, device=CPU, dtype=torch.float32)
    attend = model.blocks[1].self_attn.attend
    with dynamo.patch(specialize_float=False):
        compile_blocks(model, CPU, backend=compiler)
        forward(model, SIZES[0])
        assert seen == [True, True] and not dynamo.specialize_float

        def interrupted(*_):
            assert dynamo.specialize_float
            raise KeyboardInterrupt

        parts = model.blocks[0].parts
        model.blocks[0].parts = parts._replace(before=_constant_floats(interrupted))
        with pytest.raises(KeyboardInterrupt):
            forward(model, SIZES[0])
        assert not dynamo.specialize_float
    optimize(model, attend=attend, compile="off")
    assert all(block.parts is PLAIN_PARTS for block in model.blocks)


class Recording(Attention):
    """Torch's attention, and which calls it got."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def __call__(self, q, k, v, call):
        assert not torch.compiler.is_compiling()
        self.calls.append(call)
        return SDPA(q, k, v, call)


@torch.no_grad()
def test_runners_are_told_the_step_and_attention_what_they_say():
    """What a runner puts into the inputs of the blocks arrives at every layer of that forward, compiled or not."""

    class Cutting:
        name, place = "cutting", Place.SHARDS

        def __init__(self):
            self.seen = []

        def __call__(self, inputs, inner):
            self.seen.append(inputs.info)
            return inner(dataclasses.replace(inputs, lengths=(inputs.info.step, inputs.tokens.shape[1])))

    torch.compiler.reset()
    attend, model, cutting = Recording(), random_module(SMALL, device=CPU, dtype=torch.float32), Cutting()
    optimize(model, attend=attend)
    compile_blocks(model, CPU, backend="eager")
    x, text = torch.randn(1, 16, 2, 4, 4), torch.randn(1, 3, 48)
    with model.runners.adding(cutting):
        for step in (4, 2, 2, 7):
            info = ForwardInfo(step, ("uncond",), sparsity=step / 10)
            model(x, torch.tensor([900.0]), text, info)
            assert cutting.seen[-1] == info
            assert [(call.layer, *call.lengths) for call in attend.calls] == [(n, step, 8) for n in range(3)]
            attend.calls.clear()
    model(x, torch.tensor([900.0]), text)
    assert len(cutting.seen) == 4 and attend.calls[0].lengths == ()

"""Sparse attention in plans and in models: schedules, and whole denoises on the embedded model."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.denoised import denoise
from tests.sparse_attention import whole_block_kernel
from wan_core.checkpoint import load_dit
from wan_core.config import LoadOptions, Request, SparseOptions
from wan_core.config.skipping import parse_setting
from wan_core.execution.optimize import compile_blocks, optimize, set_attention
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.layers import PLAIN_PARTS
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.prepared_text import PreparedText
from wan_core.models.wan.runners import BlockInputs, ForwardInfo
from wan_core.ops.attention.protocol import Attention, AttentionCall
from wan_core.ops.attention.registry import BACKENDS, AttentionError
from wan_core.ops.attention.sdpa import SDPA
from wan_core.ops.attention.sparse.kernels import SparseKernel
from wan_core.ops.attention.sparse.routing import Route
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.block_layout import Blocked
from wan_core.ops.kernels.formats import Quantized
from wan_core.pipeline import pipeline
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.sources import TINY
from wan_core.sampling.cache.skipping import leave_out
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.plan import Plan, make_plan
from wan_core.sampling.sparsity import run as sparsity_run
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles
from wan_core.sampling.sparsity.schedule import sparsify

CPU = torch.device("cpu")

# ---------------------------------------------------------------------------------------------------------- the model


@pytest.fixture(scope="module")
def experts() -> dict[str, WanModel]:
    return {
        name: load_dit(TINY / f"t2v_{name}.safetensors", device=CPU, dtype=torch.float32) for name in ("high", "low")
    }


def conditioned(config: DiTConfig) -> Conditioning:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(1, n, config.text_dim, generator=generator) for n in (6, 1)]
    return Conditioning(cond=rows[0], uncond=rows[1])


def run(experts: dict[str, WanModel], plan: Plan, batched: bool = False) -> torch.Tensor:
    config = experts["high"].config
    noise = torch.randn(1, 16, 3, 10, 14, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return denoise(plan, experts.__getitem__, conditioned(config), noise, batched=batched)  # type: ignore[arg-type]


def sparse_plan(text: str, steps: int = 6) -> Plan:
    return sparsify(make_plan(task="t2v-tiny", steps=steps), SparseOptions.parse(f"{text}:ramp0"))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("batched", [False, True])
def test_reading_all_blocks_is_dense_attention(experts: dict[str, WanModel], batched: bool) -> None:
    """In tiles, with everything read: the same video but for rounding. Less read: another, but not far."""
    dense = run(experts, make_plan(task="t2v-tiny", steps=6), batched)
    assert difference(run(experts, sparse_plan("0.001"), batched), dense) < 1e-4
    half = difference(run(experts, sparse_plan("0.5"), batched), dense)
    assert 1e-4 < half < 0.3


def test_a_step_that_is_skipped_uses_residuals_in_the_order_of_tiles(experts: dict[str, WanModel]) -> None:
    """Everything read: caches give what they give without tiles."""
    options = parse_setting("taylorseer:2/0.2")
    cached = leave_out(make_plan(task="t2v-tiny", steps=12), options, None)
    tiled = sparsify(cached, SparseOptions.parse("0.001:ramp0"))
    assert any(step.skipped for step in tiled.steps if step.sparsity)
    assert difference(run(experts, tiled), run(experts, cached)) < 1e-4


def test_a_kernel_that_cannot_run_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "load_models", lambda *_: pytest.fail("weights were read"))
    request = Request(prompt="a red circle", skip=parse_setting("sparse:0.5:cudnn"))
    with pytest.raises(AttentionError, match="'cudnn' cannot run on cpu"):
        Pipeline.load(LoadOptions(model="tiny", device="cpu"), request=request)


def test_tokens_are_put_into_tiles_where_they_are(experts: dict[str, WanModel]) -> None:
    """Who calls holds them until the blocks are done: a copy would be the largest tensor of a forward, twice."""
    model = experts["high"]
    tiles = SparseTiles(model, SparseOptions.parse("0.5"), (3, 5, 7))
    tokens = torch.randn(2, 105, 8)
    before, seen = tokens.clone(), []

    def inner(inputs: BlockInputs) -> torch.Tensor:
        seen.append((inputs.tokens.data_ptr(), inputs.tokens.clone()))
        return inputs.tokens

    modulation, rope = torch.zeros(2, 1, 6, 8), torch.zeros(105, 1, 4, 2)
    after = tiles(BlockInputs(tokens, modulation, rope, PreparedText(()), ForwardInfo(), (3, 5, 7)), inner)
    tiles.install(sparse=False)
    assert seen[0][0] == tokens.data_ptr()
    assert not torch.equal(seen[0][1], before)
    assert torch.equal(after, before)


@pytest.mark.parametrize("name", ["sdpa", "math-fp8"])
def test_while_attention_runs_nobody_holds_the_norm_before_it(
    experts: dict[str, WanModel], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    block = experts["high"].blocks[0]
    backend, norm, norms = BACKENDS[name].load(), fused.norm, []

    def noting(*arguments: object) -> object:
        normed = norm(*arguments)  # type: ignore[arg-type]
        norms.append(weakref.ref(normed))
        return normed

    class Looking(Attention):
        takes_fp8, asked = backend.takes_fp8, 0

        def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
            assert norms[0]() is None
            Looking.asked += 1
            return backend(q, k, v, call)

        def quantized(self, q: Quantized, k: Quantized, v: Quantized, call: AttentionCall) -> Quantized:
            assert norms[0]() is None
            Looking.asked += 1
            return backend.quantized(q, k, v, call)

    monkeypatch.setattr(fused, "norm", noting)
    monkeypatch.setattr(block.self_attn, "attend", Looking())
    dim, head = experts["high"].config.dim, experts["high"].config.head_dim
    rope = experts["high"].rope((1, 2, 3), CPU)
    assert rope.shape == (6, 1, head // 2, 2)
    with torch.no_grad():
        prompt = block.cross_attn.kv(torch.randn(1, 4, dim))
        output = block(torch.randn(1, 6, dim), torch.zeros(1, 1, 6, dim), rope, prompt)
    assert output.shape == (1, 6, dim)
    assert len(norms) == Looking.asked == 1


def test_modulation_by_frame_stays_with_its_tokens(experts: dict[str, WanModel]) -> None:
    """A timestep for each frame, as where the first frame is known (TI2V)."""
    model = experts["high"]
    x = torch.randn(1, 16, 3, 10, 14)
    times = torch.tensor([[0.0, 400.0, 900.0]])
    text = model.prepare_text(conditioned(model.config).cond)
    step = sparse_plan("0.001").steps[0]
    with torch.no_grad():
        dense = model(x, times, text)
        with in_tiles(model, SparseTiles(model, SparseOptions.parse("0.001"), (3, 5, 7))):
            output = model(x, times, text, ForwardInfo(sparsity=step.sparsity))
    assert difference(output, dense) < 1e-4


def test_what_decorates_attention_keeps_its_place(experts: dict[str, WanModel]) -> None:
    """Sparse attention goes inside what moves tokens between devices: in the place of its `local`."""

    class Around(Attention):
        calls = 0

        def __init__(self, local: Attention) -> None:
            self._local = local

        @property
        def local(self) -> Attention:
            return self._local

        def around(self, local: Attention) -> Around:
            return Around(local)

        def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
            Around.calls += 1
            return self._local(q, k, v, call)

    model = experts["high"]
    around = Around(SDPA)
    plain_video = run(experts, sparse_plan("0.5", 3))
    before = Around.calls
    for each in experts.values():
        set_attention(each, around)
    try:
        latents = run(experts, sparse_plan("0.5", 3))
        assert model.blocks[0].self_attn.attend is around
        assert around.local is SDPA
    finally:
        for each in experts.values():
            set_attention(each, SDPA)
    assert Around.calls > before
    assert torch.equal(latents, plain_video)


def test_a_compiled_block_is_one_for_all_layers() -> None:
    """Layers and sparsities are not arguments of what is compiled: one graph before attention and one after it."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    model = load_dit(TINY / "t2v_high.safetensors", device=CPU, dtype=torch.float32)
    del model.blocks[2:]
    experts = {"high": model, "low": model}
    plain_video = run(experts, sparse_plan("0.5", 4))
    torch._dynamo.reset()
    compile_blocks(model, CPU, backend="eager")
    before = counters["stats"]["unique_graphs"]
    latents = run(experts, sparse_plan("0.5", 4))
    assert difference(latents, plain_video) < 1e-4
    assert counters["stats"]["unique_graphs"] - before == 2
    after = counters["stats"]["unique_graphs"]
    run(experts, sparse_plan("0.75", 4))
    assert counters["stats"]["unique_graphs"] == after


@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_fp8_goes_from_the_projection_to_the_kernel_in_whole_blocks(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a kernel that reads FP8 memory in whole blocks, as cuDNN's does: what a block writes, compiled or not, is
    what it reads."""
    torch.compiler.reset()
    model = load_dit(TINY / "t2v_high.safetensors", device=CPU, dtype=torch.float32)
    del model.blocks[2:]
    asked: list[Blocked] = []

    def kernel(q: Blocked, k: Blocked, v: Blocked, route: Route, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(v)
        return whole_block_kernel(q, k, v, route, block)

    found_kernel = SparseKernel("whole blocks", "", lambda: kernel, fp8=True, any_block=True)
    monkeypatch.setattr(sparsity_run, "resolve_kernel", lambda *_, **__: found_kernel)
    text = model.prepare_text(conditioned(model.config).cond)
    x, time = torch.randn(1, 16, 3, 10, 14, generator=torch.Generator().manual_seed(5)), torch.tensor([900.0])
    dense = optimize(model, attend=BACKENDS["math-fp8"].load())(x, time, text)
    if compiled:
        compile_blocks(model, CPU, backend="aot_eager")
    for sparsity, allowed in ((0.001, 0.06), (0.5, 0.5)):
        tiles = SparseTiles(model, SparseOptions(sparsity=sparsity, ramp=0), (3, 5, 7))
        with in_tiles(model, tiles):
            output = model(x, time, text, ForwardInfo(sparsity=sparsity))
            if compiled:
                for block in model.blocks:
                    block.parts = PLAIN_PARTS
                assert difference(output, model(x, time, text, ForwardInfo(sparsity=sparsity))) < 1e-3
                compile_blocks(model, CPU, backend="aot_eager")
        assert difference(output, dense) < allowed
    assert all(v.channels_first and v.tokens == 105 and v.memory.shape[-1] % tiles.block == 0 for v in asked)
    assert 105 % tiles.block, "the last block is not full"

"""Blocks that stream: the same numbers as resident ones, bit for bit, whatever streams or fails between.

On a CPU the copies are plain ones; order and bookkeeping are those of a GPU. What a GPU adds is in test_gpu_stream.py.
"""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch

from tests.loras_on import loras_on
from tests.streamed_experts import CPU, SMALL, expert, experts, run, streaming
from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.lora.read import read_lora
from wan_core.checkpoint.save import write_safetensors
from wan_core.config import LoadOptions, LoraOptions, MagCacheOptions, Request, SkipOptions
from wan_core.execution.memory.host_weights import HostWeights, tensors_of
from wan_core.execution.memory.residency import Residency
from wan_core.execution.memory.streaming import Stage
from wan_core.execution.optimize import compilations, compile_blocks
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.ops.quant.fp8 import Fp8RowLinear
from wan_core.ops.quant.linear import is_attached
from wan_core.ops.quant.swap import Quantization
from wan_core.ops.quant.transformer_engine import TEDelayedLinear
from wan_core.pipeline.loras import Wanted, attachable
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.cache.curves import find_curve
from wan_core.sampling.cache.skipping import leave_out
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.plan import make_plan

HELD = {
    "plain": None,
    "fp8, ends kept": Quantization(Fp8RowLinear, CPU, 1),
    "te-delayed": Quantization(TEDelayedLinear, CPU),
}
CAPTION = "a red circle moving right on a blue background"
FOUR_STEPS = Request(prompt=CAPTION, steps=4, seed=3, guidance_mode="sequential", width=32, height=32, frames=5)


# Each way of holding weights with the plans that are its own: they meet in no code.
PLANS = [("plain", None), ("plain", 0), ("plain", 3), ("fp8, ends kept", 1), ("te-delayed", None), ("te-delayed", 1)]
EVERY_PLAN = pytest.mark.parametrize(("quantization", "resident"), [(HELD[name], resident) for name, resident in PLANS])
# No block stays, one does, whole experts swap: LoRAs meet nothing else of a plan.
SOME = [("plain", 0), ("fp8, ends kept", 1), ("plain", None)]
SOME_PLANS = pytest.mark.parametrize(("quantization", "resident"), [(HELD[name], resident) for name, resident in SOME])


@EVERY_PLAN
def test_streamed_is_resident_bit_for_bit(quantization, resident):
    plan = make_plan(steps=4)
    assert set(plan.experts) == {"high", "low"}
    residency = streaming(quantization, resident)
    for batched in (False, True):
        exact = run(experts(quantization).__getitem__, plan, batched=batched)
        for _ in range(2):  # the second video finds what the first left
            assert torch.equal(run(residency.use, plan, batched=batched), exact)


def test_a_skipped_step_moves_nothing():
    plan = make_plan(steps=10)
    options = SkipOptions(magcache=MagCacheOptions(threshold=10, max_skips=2, retention=0.2))
    skipping = leave_out(plan, options, find_curve(None, "t2v-A14B"))
    residency, plain = streaming(None, 0), experts()
    stage, loads, seen = next(iter(residency.stages.values())), [], []
    copy = stage._copy
    stage._copy = lambda *a, **k: (loads.append(a), copy(*a, **k))[1]

    def on_step(progress):
        seen.append((progress.forwards, len(loads)))

    exact = run(plain.__getitem__, skipping)
    assert torch.equal(run(residency.use, skipping, on_step=on_step), exact)
    idle = [after - before for (_, before), (forwards, after) in itertools.pairwise(seen) if not forwards]
    assert idle and not any(idle)


def test_compiled_blocks_compile_once_whatever_streams():
    torch.compiler.reset()
    plan = make_plan(steps=2)
    plain = experts()
    for model in plain.values():
        compile_blocks(model, CPU, backend="eager")
    before = compilations()
    exact = run(plain.__getitem__, plan)
    assert compilations() - before == 2  # before attention, and after it
    for resident in (0, 1):
        residency = streaming(None, resident)
        for model in residency.models.values():
            compile_blocks(model, CPU, backend="eager")
        assert torch.equal(run(residency.use, plan), exact)
    assert compilations() - before == 2


def test_weights_come_home_and_names_never_change():
    model = expert(0)
    before = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    shelf = HostWeights(model, lock=False)
    stage = Stage(CPU, 2)
    stage.use(shelf)
    with torch.no_grad():
        model(draw_noise(0, (1, 16, 2, 4, 6)), torch.tensor([1.0]), draw_noise(1, (1, 5, 48)))
    stage.leave_device()
    after = tensors_of(model)
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    homes = [unit.memory.bytes for unit in shelf.units]
    inside = [any(h.data_ptr() <= t.data_ptr() < h.data_ptr() + len(h) for h in homes) for t in after.values()]
    assert all(inside)


def test_host_weights_keep_layouts_that_are_not_plain():
    """Convolutions that run channels-last, empty tensors, views with holes."""
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.randn(4, 3, 2, 5).to(memory_format=torch.channels_last))
    module.b = torch.nn.Parameter(torch.randn(8, 6)[:, ::2])
    module.register_buffer("c", torch.zeros(0, 3))
    module.register_buffer("d", torch.tensor(3, dtype=torch.int64))
    before = {name: tensor.clone() for name, tensor in tensors_of(module).items()}
    strides = module.a.stride()
    shelf, stage = HostWeights(module, lock=False), Stage(CPU)
    stage.use(shelf)
    assert module.a.stride() == strides and module.a.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors_of(module).items())


def test_weights_that_cannot_be_pinned_stream_from_where_they_are(monkeypatch):
    monkeypatch.setattr("wan_core.execution.memory.residency.available_bytes", lambda: 1000)
    plan, residency = make_plan(steps=2), streaming(None, 1)
    assert len(residency.notes) == 2 and "would not fit" in residency.notes[0]
    assert all(unit.memory is None for shelf in residency.host_weights.values() for unit in shelf.units)
    assert torch.equal(run(residency.use, plan), run(experts().__getitem__, plan))


# ----------------------------------------------------------------------------------------------------------- LoRAs

RANKS = {"high": 2, "low": 5}


def lora_state(config: DiTConfig, rank: int) -> dict[str, torch.Tensor]:
    """On every linear that takes one, and a difference in full on a norm."""
    draw, shapes, state = torch.Generator().manual_seed(rank), expected_shapes(config), {}
    for module in sorted(attachable(config)):
        n, k = shapes[f"{module}.weight"]
        state[f"diffusion_model.{module}.lora_A.weight"] = torch.randn(rank, k, generator=draw) * k**-0.5
        state[f"diffusion_model.{module}.lora_B.weight"] = torch.randn(n, rank, generator=draw) * 0.2
    state["diffusion_model.blocks.1.norm3.diff"] = torch.randn(config.dim, generator=draw) * 0.1
    return state


def with_loras(quantization: Quantization | None, ranks: dict[str, int]) -> dict[str, WanModel]:
    models = experts(quantization)
    for name, model in models.items():
        lora = read_lora(lora_state(SMALL, ranks[name]), expected_shapes(SMALL))
        loras_on(model, CPU).attached.apply(model, [Wanted(lora, 0.7, (name, 0, 0))])
    return models


@SOME_PLANS
def test_loras_attached_to_weights_that_stream(quantization, resident):
    """They stay on the device: experts take turns in one stage, whatever the ranks of their LoRAs."""
    plan, ranks = make_plan(steps=4), {"high": 3, "low": 3} if resident == 1 else RANKS
    plain = with_loras(quantization, ranks)
    exact = run(plain.__getitem__, plan)
    assert not torch.equal(exact, run(experts(quantization).__getitem__, plan))
    residency = Residency(CPU, "swap" if resident is None else "stream", resident_blocks=resident or 0)
    for name, model in with_loras(quantization, ranks).items():
        residency.add(name, model)
    assert len(residency.stages) == 1
    for _ in range(2):
        assert torch.equal(run(residency.use, plan), exact)
    for weights in residency.host_weights.values():
        attached = [name for name in tensors_of(weights.model) if is_attached(name)]
        assert len(attached) == 2 * len(attachable(SMALL))
        travelling = sum(len(unit.tensors) for unit in weights.units)
        assert travelling == len(tensors_of(weights.model)) - len(attached)


@SOME_PLANS
def test_loras_change_while_weights_stream(quantization, resident):
    """On, stronger, others, off: each as where weights stay, and off leaves every bit as it was."""
    plan, residency = make_plan(steps=2), streaming(quantization, resident)
    plain = experts(quantization)
    loras = {rank: read_lora(lora_state(SMALL, rank), expected_shapes(SMALL)) for rank in (2, 5)}
    for wanted in ([(2, 0.7)], [(2, -0.3)], [(5, 1.0), (2, 0.5)], []):
        loras_of_step = [Wanted(loras[rank], strength, (str(rank), 0, 0)) for rank, strength in wanted]

        def use(name, loras_of_step=loras_of_step):
            model = residency.use(name)
            applied = loras_on(model, CPU).attached
            if applied.writes_weights(loras_of_step):
                residency.release(name)
            applied.apply(model, loras_of_step)
            return residency.use(name)

        for model in plain.values():
            loras_on(model).attached.apply(model, loras_of_step)
        assert torch.equal(run(use, plan), run(plain.__getitem__, plan))
    for name, model in experts(quantization).items():
        residency.release(name)
        now = tensors_of(residency.models[name])
        assert all(torch.equal(tensor, now[key]) for key, tensor in tensors_of(model).items() if "amax" not in key)


@pytest.mark.parametrize("mode", ["attach", "merge"])
def test_a_pipeline_that_streams_with_loras_of_different_ranks(tmp_path, mode):
    config = Pipeline.load(LoadOptions(model="tiny", device="cpu")).models.dit_config
    for name, rank in RANKS.items():
        write_safetensors(lora_state(config, rank), tmp_path / f"{name}.safetensors", {})
    loras = tuple(LoraOptions(path=str(tmp_path / f"{name}.safetensors"), expert=name) for name in RANKS)
    latents = []
    for where in ({}, {"residency": "stream", "resident_blocks": 2}):
        pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", loras=loras, lora_mode=mode, **where))
        latents += [latents_of(pipe, FOUR_STEPS)[0] for _ in range(2)]
    assert all(torch.equal(one, latents[0]) for one in latents)


# --------------------------------------------------------------------------------------------------- out of memory


@contextlib.contextmanager
def memory_runs_out(model: WanModel, at: int):
    """The `at`-th run of the third block raises what torch raises."""
    calls = []

    def hook(*_):
        calls.append(1)
        if len(calls) == at:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory (as a test wants it)")

    handle = model.blocks[2].register_forward_pre_hook(hook)
    try:
        yield calls
    finally:
        handle.remove()


def latents_of(pipe: Pipeline, request: Request, on_step=None):
    prepared = pipe.prepare(request)
    return pipe.sample(prepared, pipe.encode(prepared), on_step), pipe.report


@pytest.mark.parametrize(("residency", "at"), [("auto", 1), ("stream", 4)])  # of 4 runs
def test_out_of_memory_goes_on_from_the_last_finished_step(residency, at, caplog):
    options = LoadOptions(
        model="tiny", device="cpu", residency=residency, resident_blocks=4 if residency == "stream" else None
    )
    pipe = Pipeline.load(options)
    exact, _ = latents_of(pipe, FOUR_STEPS)
    steps = []
    with memory_runs_out(pipe.models.residency.models["high"], at) as calls:
        latents, report = latents_of(pipe, FOUR_STEPS, lambda progress, _: steps.append(progress.step.index))
    assert steps == [0, 1, 2, 3] and len(calls) >= at
    assert torch.equal(latents, exact)
    assert any("out of memory, going on" in note for note in report.notes) and "out of memory" in caplog.text
    assert torch.equal(latents_of(pipe, FOUR_STEPS)[0], exact)  # and the next video is whole again


# --------------------------------------------------------------------------------------------------- whole pipelines


@pytest.mark.parametrize("at", [3, 5])
def test_out_of_memory_between_skipped_steps(at):
    """What a cache keeps, and that it stands around the blocks, outlives the change of plans."""
    options = SkipOptions(magcache=MagCacheOptions(threshold=10, max_skips=2, retention=0.2))
    plan = leave_out(make_plan(steps=12), options, find_curve(None, "t2v-A14B"))
    exact, forwards = run(experts().__getitem__, plan), []
    residency = Residency(CPU, "resident")
    for name, model in experts().items():
        residency.add(name, model)

    def relieve(name):
        assert residency.cheaper(name)
        residency.use(name)
        return True

    with memory_runs_out(residency.models["high"], at):
        ours = run(
            residency.use, plan, relieve=relieve,
            on_step=lambda progress: forwards.append(progress.forwards),
        )  # fmt: skip
    assert torch.equal(ours, exact) and forwards.count(0) > 2 and residency.policy == "swap"
    assert torch.equal(run(residency.use, plan), exact)

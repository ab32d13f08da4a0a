"""What prepares the first step while weights are read: it saves time, changes no bit, and fails nobody."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from wan_core.checkpoint.staged import Reading, current_reading, reading
from wan_core.config import LoadOptions, Request, SkipOptions, SparseOptions
from wan_core.execution import optimize as optimizing
from wan_core.execution.memory.planning import GIB, beside_weights, plan_memory, unit_bytes
from wan_core.execution.memory.planning import Sizes as PlanSizes
from wan_core.execution.optimize import compilations
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.config import I2V_A14B, T2V_A14B
from wan_core.models.wan.tasks import find_task
from wan_core.pipeline import rehearsal as rehearsing
from wan_core.pipeline.builder import find_quantization
from wan_core.pipeline.loading import load_parts
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.rehearsal import Rehearsal, stand_in, why_not_beside
from wan_core.pipeline.resolved_request import make_job

CPU = torch.device("cpu")
REQUEST = Request(
    prompt="a red circle moving right on a blue background", steps=3, seed=3, width=64, height=48, frames=9
)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    for name in ("WANCORE_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture
def on_cpu(monkeypatch):
    """As on a GPU: there is something to prepare whether blocks are compiled or not."""
    monkeypatch.setattr(Rehearsal, "worthwhile", property(lambda self: True))


def latents(pipe: Pipeline) -> torch.Tensor:
    job = pipe.prepare(REQUEST)
    return pipe.sample(job, pipe.encode(job))


def noted(made: list[weakref.ref], model):
    made.append(weakref.ref(model))
    return model


def exact(monkeypatch, **options) -> torch.Tensor:
    with monkeypatch.context() as patch:
        patch.setattr(Rehearsal, "worthwhile", property(lambda self: False))
        return latents(Pipeline.load(LoadOptions(model="tiny", device="cpu", **options), request=REQUEST))


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "fp8", "keep_blocks": 1}, {"precision": "te-delayed"}, {"residency": "stream"}],
    ids=str,
)
def test_the_same_video_bit_for_bit(options, on_cpu, monkeypatch):
    monkeypatch.setattr("wan_core.ops.quant.transformer_engine.why_not", lambda *_: None)
    made, interval, numbers = [], sys.getswitchinterval(), torch.get_rng_state()
    monkeypatch.setattr(rehearsing, "stand_in", lambda *given: noted(made, stand_in(*given)))
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", **options), request=REQUEST)
    assert any("the first step was prepared" in note for note in pipe.loaded.notes)
    assert [gone() for gone in made] == [None]  # its weights and its calibration
    assert torch.equal(torch.get_rng_state(), numbers) and sys.getswitchinterval() == interval
    assert torch.equal(latents(pipe), exact(monkeypatch, **options))


@pytest.mark.parametrize("precision", ["checkpoint", "fp8"])
def test_the_first_step_compiles_nothing_that_was_prepared(precision, monkeypatch):
    """Dynamo decides what is compiled; the compiler behind it is left out here, so that what the graph computes are the
    bits of blocks that are not compiled."""
    monkeypatch.setattr(optimizing, "compile_blocks", partial(optimizing.compile_blocks, backend="eager"))
    torch.compiler.reset()
    options = {"compile": "blocks", "precision": precision}
    made, before = [], compilations()
    monkeypatch.setattr(rehearsing, "stand_in", lambda *given: noted(made, stand_in(*given)))
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", **options), request=REQUEST)
    assert compilations() - before == 1 and not pipe.models.compiles
    assert [gone() for gone in made] == [None]  # a compiled module refers to itself
    ours = latents(pipe)
    assert compilations() - before == 1
    assert torch.equal(ours, exact(monkeypatch, precision=precision))


def test_what_was_compiled_before_is_left_to_the_first_step(monkeypatch):
    """All that is left of it is Python, which readers need as well."""
    monkeypatch.setattr(optimizing, "compile_blocks", partial(optimizing.compile_blocks, backend="eager"))
    torch.compiler.reset()

    def load(own):
        own.loaded = True
        return "what was compiled before is used again"

    monkeypatch.setattr("wan_core.execution.compile_cache.Artifacts.load", load)
    monkeypatch.setattr("wan_core.execution.compile_cache.Artifacts.save", lambda *_: False)
    before = compilations()
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", compile="blocks"), request=REQUEST)
    assert compilations() == before and not pipe.models.rehearsed and not pipe.models.compiles
    assert "compile: what was compiled before is used again" in pipe.loaded.notes
    ours = latents(pipe)
    assert compilations() - before == 1 and torch.equal(ours, exact(monkeypatch))


def test_a_compiler_that_cannot_be_imported_fails_nobody(on_cpu, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", None)
    rehearsal = Rehearsal(
        config=T2V_A14B, device=CPU, dtype=torch.float32, quantization=None, attend=None, compile="blocks", job=None
    )
    rehearsal.begin()
    (note,) = rehearsal.notes
    assert "it takes longer (ModuleNotFoundError" in note and not rehearsal.beside


def test_garbage_is_looked_for_once_and_only_in_what_is_new():
    class Knot:
        pass

    def tied() -> weakref.ref:
        knot = Knot()
        knot.own = knot
        return weakref.ref(knot)

    gc.collect()
    old = tied()
    with rehearsing.collected_after():
        with rehearsing.collected_after():
            pass
        new = tied()
        assert not gc.isenabled()
    assert new() is None and old() is not None  # what was there before was not searched
    assert gc.isenabled() and gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None
    gc.disable()
    gc.freeze()
    try:
        with rehearsing.collected_after():
            new = tied()
        assert new() is None and not gc.isenabled() and gc.get_freeze_count()  # as it was found
    finally:
        gc.unfreeze()
        gc.enable()


@pytest.mark.parametrize(("dense", "graphs"), [(0.0, 1), (0.4, 2)])
def test_sparse_steps_are_prepared_as_they_run(dense, graphs, monkeypatch):
    """They are other code than dense ones: where a run has both, both are there."""
    monkeypatch.setattr(optimizing, "compile_blocks", partial(optimizing.compile_blocks, backend="eager"))
    torch.compiler.reset()
    skip = SkipOptions(sparse=SparseOptions(sparsity=0.5, dense_steps=dense, ramp=0))
    request, before = replace(REQUEST, skip=skip), compilations()
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", compile="blocks"), request=request)
    assert compilations() - before == graphs and pipe.models.rehearsed
    job = pipe.prepare(request)
    pipe.sample(job, pipe.encode(job))
    assert compilations() - before == graphs


def test_branches_are_prepared_as_they_run(on_cpu, monkeypatch):
    """Streaming runs both in one forward where other places would not."""
    prepared = []
    monkeypatch.setattr("wan_core.sampling.denoise.BATCHED_TOKENS", 0)
    monkeypatch.setattr(rehearsing, "forward_once", lambda _, job, *__: prepared.append(job.batched))
    for residency in ("auto", "stream"):
        pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", residency=residency), request=REQUEST)
        prepared.append(pipe.prepare(REQUEST).batched)
    assert prepared == [False, False, True, True]


def test_what_fails_only_takes_longer(on_cpu, monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel\nand more")

    monkeypatch.setattr(rehearsing, "forward_once", fail)
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu"), request=REQUEST)
    assert "preparing the first step failed, and it takes longer (RuntimeError: no kernel)" in pipe.loaded.notes
    assert not pipe.models.rehearsed
    assert torch.equal(latents(pipe), exact(monkeypatch))


@pytest.fixture
def begun():
    """Threads that began in this test and run still. Others may be there: torch's compiler keeps a pool of its own,
    whose threads have the same names."""
    before = set(threading.enumerate())
    return lambda: set(threading.enumerate()) - before


class Cancelled(Exception):
    pass


def test_cancelled_while_it_prepares(on_cpu, monkeypatch, begun):
    """Interrupted in the thread that prepares: the others stop within a tensor, and nothing is left running."""
    read, reads, interrupted = [], threading.Event(), threading.Event()

    def on_bytes(count):
        read.append(count)
        reads.set()
        assert interrupted.wait(60)
        time.sleep(0.05)  # a tensor takes as long: hundreds of them, in four threads, would take seconds

    def interrupt(*_):
        assert reads.wait(60)
        interrupted.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(rehearsing, "stand_in", interrupt)
    with reading(Reading(on_bytes=on_bytes)), pytest.raises(KeyboardInterrupt):
        Pipeline.load(LoadOptions(model="tiny", device="cpu"), request=REQUEST)
    assert not begun()
    assert len(read) < 100  # of hundreds of tensors


def test_cancelled_while_it_reads(on_cpu, monkeypatch, begun):
    read, cancelled = [], threading.Event()

    def on_bytes(count):
        read.append(count)
        if len(read) > 5:
            cancelled.set()
            raise Cancelled
        time.sleep(0.05)

    def slow(*_):
        assert cancelled.wait(60)

    monkeypatch.setattr(rehearsing, "stand_in", slow)
    with reading(Reading(on_bytes=on_bytes)), pytest.raises(Cancelled):
        Pipeline.load(LoadOptions(model="tiny", device="cpu"), request=REQUEST)
    assert not begun() and len(read) < 100


def test_a_model_that_cannot_be_read_ends_both():
    """The forward is not made once it is known that there will be no video, and the others' reading ends."""
    asked, ended = [], threading.Event()

    def load(name):
        if name == "low":
            raise OSError("gone")
        for _ in range(3000):  # half a minute
            time.sleep(0.01)
            on_bytes = current_reading().on_bytes
            assert on_bytes is not None
            try:
                on_bytes(1)
            except Exception:
                ended.set()
                raise
        return torch.nn.Identity()

    def run(wanted):
        time.sleep(0.1)
        asked.append(wanted())

    fake = SimpleNamespace(worthwhile=True, begin=lambda: None, beside=True, run=run)
    begin = time.perf_counter()
    with pytest.raises(OSError, match="gone"):
        load_parts(["high", "low"], load, CPU, in_order=False, rehearsal=fake)  # type: ignore
    assert asked == [False] and ended.is_set() and time.perf_counter() - begin < 15


def plan_of(room_gib: float, mode):
    units = unit_bytes(T2V_A14B, 2, False)
    sizes = PlanSizes(units=units, experts=2, text_encoder=11 * GIB, vae=GIB // 4)
    beside = beside_weights(T2V_A14B, VAE_21, (1, 16, 21, 90, 160), per_token=5.05)
    return plan_memory(sizes, beside, int(room_gib * GIB), mode)


def test_where_there_is_no_room_beside_the_reading():
    request = Request(prompt="", width=1280, height=720, frames=81)
    job = make_job(request, find_task("t2v-A14B"), T2V_A14B, VAE_21)
    given = {"compile": "off", "precision": "bf16", "files": 4}

    def reason(room, mode):
        return why_not_beside(plan_of(room, mode), job, T2V_A14B, torch.bfloat16, None, **given)

    assert (
        reason(140, "resident") is None and why_not_beside(None, job, T2V_A14B, torch.bfloat16, None, **given) is None
    )
    assert reason(24, "stream") is None  # the weights are read to the host
    tight = reason(75, "resident")
    assert tight is not None and "no room" in tight
    assert "no room" in str(reason(9, "stream"))


def test_the_stand_in_has_every_kind_of_block():
    small = {"dim": 128, "ffn_dim": 256, "num_heads": 2, "num_layers": 6, "text_dim": 48}
    for config in (replace(T2V_A14B, **small), replace(I2V_A14B, **small)):
        plain = stand_in(config, CPU, torch.float32, None)
        assert len(plain.blocks) == 1 and plain.config.in_channels == config.in_channels
        held = find_quantization("fp8", CPU, keep_blocks=2)
        kinds = [type(block.ffn[0]).__name__ for block in stand_in(config, CPU, torch.float32, held).blocks]
        assert kinds[0] == kinds[2] == "Linear" != kinds[1]


def test_no_compiler_is_imported_where_nothing_is_compiled():
    """It takes seconds, and describing a module on the meta device is enough to make torch do it."""
    code = """
import sys
from wan_core.config import LoadOptions, Request
from wan_core.pipeline.pipeline import Pipeline
request = Request(prompt="a red circle", steps=2, width=48, height=48, frames=5)
Pipeline.load(LoadOptions(model="tiny", device="cpu"), request=request).generate(request)
print([name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr[-2000:]

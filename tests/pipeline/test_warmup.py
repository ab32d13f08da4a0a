"""A warm-up runs each expert once and changes nothing; compilers keep their results in the cache folder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.stand_ins import TRANSFORMERS
from wan_core.config import LoadOptions, Request, SkipOptions, SparseOptions
from wan_core.pipeline import first_use
from wan_core.pipeline.first_use import load_kernels
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.settings import resolve_settings
from wan_core.pipeline.sources import find_models
from wan_core.sampling.plan import make_plan

CPU = torch.device("cpu")
CAPTION = "a red circle moving right on a blue background"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WANCORE_CACHE", str(tmp_path / "cache"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def test_both_experts_are_warm_and_nothing_changes():
    request = Request(prompt=CAPTION, steps=4, seed=3)
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", residency="stream", resident_blocks=2))
    run = pipe.prepare(request)
    exact = pipe.sample(run, pipe.encode(run))
    phases, calls = [], dict.fromkeys(("high", "low"), 0)
    for name in calls:
        module = pipe.models.residency.models[name]
        module.register_forward_hook(lambda *_, n=name: calls.__setitem__(n, calls[n] + 1))
    pipe.warm_up(request, phases.append)
    assert phases == ["warm up low", "warm up high"] and calls == {"high": 1, "low": 1}
    assert {"warm up high", "warm up low"} <= pipe.report.phases.keys()
    run = pipe.prepare(request)
    assert torch.equal(pipe.sample(run, pipe.encode(run)), exact)


def test_sparse_steps_are_warm_too():
    """One forward of each expert, with the attention of the run."""
    request = Request(prompt=CAPTION, steps=4, seed=3, skip=SkipOptions(sparse=SparseOptions(sparsity=0.5, ramp=0)))
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu"))
    run, calls = pipe.prepare(request), {}
    exact = pipe.sample(run, pipe.encode(run))
    for name in ("high", "low"):
        block = pipe.models.residency.models[name].blocks[0]
        block.register_forward_pre_hook(  # the fifth input of a block is the call of attention
            lambda _, inputs, n=name: calls.setdefault(n, []).append(inputs[4].sparse is not None)
        )
    pipe.warm_up(request)
    assert {name: set(several) for name, several in calls.items()} == {"high": {True}, "low": {True}}
    run = pipe.prepare(request)
    assert torch.equal(pipe.sample(run, pipe.encode(run)), exact)


def test_a_warm_up_that_runs_out_of_memory_goes_on():
    request = Request(prompt=CAPTION, steps=4, seed=3)
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu"))
    failed = []

    def fail(*_):
        if not failed:
            failed.append(1)
            raise torch.cuda.OutOfMemoryError("as a test wants it")

    pipe.models.residency.models["low"].blocks[2].register_forward_pre_hook(fail)
    pipe.warm_up(request)
    assert failed and any("out of memory, going on" in note for note in pipe.report.notes)


@pytest.mark.parametrize("precision", ["checkpoint", "fp8-weights"])
@pytest.mark.parametrize("image", [False, True], ids=["text", "clip image"])
def test_a_block_of_the_model_runs_the_way_the_model_will(image: bool, precision: str, monkeypatch) -> None:
    """Its width, its linears and its attention, without its weights."""
    options = LoadOptions(model="tiny", precision=precision)
    settings = resolve_settings(find_models(options), options, CPU)
    config = replace(settings.recognised.dit, **({"image_dim": 24, "in_channels": 36} if image else {}))
    seen: list[tuple[int, ...]] = []
    attend = settings.attend

    class Seen(type(attend)):  # type: ignore[misc]
        def __call__(self, q, k, v, *more):
            seen.append(tuple(q.shape))
            return attend(q, k, v, *more)

    monkeypatch.setattr(type(settings.recognised), "dit", property(lambda _: config))
    seer = Seen.__new__(Seen)
    vars(seer).update(vars(attend))
    load_kernels(replace(settings, attend=seer), CPU)
    assert seen == [(1, 64, config.num_heads, config.head_dim)]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_forward_of_each_family_needs_no_media(name: str) -> None:
    """Also of those that take features of an image, as ranks that prepare kernels and a warm-up run it."""
    config, models = TRANSFORMERS[name], find_models(LoadOptions(model="tiny"))
    settings = resolve_settings(models, LoadOptions(model="tiny"), CPU)
    of = {**models.of, "high": replace(models.of["high"], config=config)}
    settings = replace(settings, recognised=replace(models, of=of))  # type: ignore[arg-type]
    workload = replace(
        make_plan(task="t2v-tiny", steps=2),
        latent_shape=(1, config.out_channels, 3, 8, 8),
        guidance_mode="batched",
        image=True,
    )
    first_use.forward_each_kind(first_use.random_block(settings, CPU), workload, workload.steps, CPU)

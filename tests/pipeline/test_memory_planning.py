"""From options, files and the room on a GPU to the residency of a run. No GPU is used: its free memory is given."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from wan_core.config import LoadOptions, LoraOptions, OptionError, Request, SparseOptions
from wan_core.execution.memory.planning import GIB, factor, plan_memory
from wan_core.execution.report import Report
from wan_core.pipeline import memory_planning
from wan_core.pipeline.card_choice import task_memory
from wan_core.pipeline.loras import lora_bytes
from wan_core.pipeline.memory_planning import (
    beside_plan,
    choose_residency,
    memory_plan_of,
    model_sizes,
)
from wan_core.pipeline.model_parts import Parts
from wan_core.pipeline.settings import ModelSettings, resolve_settings
from wan_core.pipeline.sources import TINY_LORAS, find_models
from wan_core.sampling.plan import make_plan

CPU = torch.device("cpu")
LARGE = LoadOptions(model="random:t2v-A14B", precision="bf16")
WORKLOAD = replace(make_plan(), latent_shape=(1, 16, 21, 60, 104))


def large(models: Parts, options: LoadOptions = LARGE) -> ModelSettings:
    return resolve_settings(models, options, CPU)


@pytest.fixture(scope="module")
def whole() -> Parts:
    return find_models(LARGE)


@pytest.fixture(scope="module")
def experts(whole: Parts) -> Parts:
    return Parts(whole.task, {name: whole.of[name] for name in ("high", "low")}, whole.vae)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch):
    def of(gib: float) -> None:
        monkeypatch.setattr(memory_planning, "device_room", lambda *_: int(gib * GIB))

    return of


def test_attention_in_parts_is_in_the_plan() -> None:
    """Measured: a clip of Animate-2 at 832x480, 81 frames, in FP8 took 29.23 GiB beside its weights."""
    models = find_models(LoadOptions(model="random:animate2-14B-distilled"))
    workload = replace(make_plan(steps=10, guidance_high=1, guidance_low=1), latent_shape=(1, 16, 22, 60, 104))
    per_token = factor(models.dit, itemsize=2, device="cuda", compile="off", precision="fp8")
    planned = beside_plan(models, workload, per_token, 2).denoise / GIB
    assert 29.23 <= planned < 1.02 * 29.23


def test_slopes_of_sparse_attention_take_memory():
    """At 720p a matrix of 128 x 128 for each of 40 heads and 591 blocks in bf16: 0.77 GB, and what makes them."""
    models, plan = find_models(LoadOptions(model="random:t2v-A14B", precision="fp8")), make_plan()
    shape = (1, 16, 21, 90, 160)
    taken = [
        beside_plan(models, replace(replace(plan, sparse=sparse), latent_shape=shape), 5.05, 2).denoise
        for sparse in (None, SparseOptions(sparsity=0.75, slope=False), SparseOptions(sparsity=0.75))
    ]
    assert taken[0] == taken[1]
    assert 0.77e9 < taken[2] - taken[1] < 2.5e9


@pytest.mark.parametrize(("task", "sees"), [("i2v-14B-480P", True), ("i2v-A14B", False), ("animate2-14B", True)])
def test_a_task_that_needs_an_image_plans_for_what_sees_it(task: str, sees: bool) -> None:
    """Before there is one: the VAE, and CLIP where the task takes its features, beside what they compute."""
    sizes, activations = task_memory(LoadOptions(model=f"random:{task}"), Request(prompt=""))
    phases = {phase.name: phase for phase in plan_memory(sizes, activations, 40 * GIB, "swap").phases}
    assert (sizes.clip_vision > 0) == sees and 0 < activations.image == activations.decode
    assert phases["encode image"].weights >= sizes.vae + sizes.clip_vision
    assert ("CLIP" in phases["encode image"].what) == sees


def test_transformers_alone_plan_for_nothing_else(whole: Parts, experts: Parts, room) -> None:
    room(66)
    alone, all_of_it = (memory_plan_of(large(models), WORKLOAD) for models in (experts, whole))
    assert model_sizes(large(experts)).text_encoder == model_sizes(large(experts)).vae == 0
    phases = {phase.name: phase.total for phase in alone.phases}
    assert alone.policy == "resident" and all_of_it.policy == "swap"
    assert phases["denoise"] == model_sizes(large(experts)).expert * 2 + alone.beside["high"]
    assert alone.beside["high"] == all_of_it.beside["high"] and alone.beside["vae"] == 0


def test_several_videos_take_more(experts: Parts, room) -> None:
    room(80)
    shapes = ((n, 16, 21, 60, 104) for n in (1, 2))
    plans = (memory_plan_of(large(experts), replace(WORKLOAD, latent_shape=shape)) for shape in shapes)
    one, two = (plan.beside["high"] for plan in plans)
    assert 1.5 * one < two < 2 * one


@pytest.mark.parametrize("ranks", [False, True])
def test_transformers_that_stream_keep_the_blocks_that_fit(experts: Parts, room, ranks: bool) -> None:
    """On one device, and on ranks, which agree on the fullest one's."""
    room(24)
    options = replace(LARGE, residency="stream")
    plan = memory_plan_of(large(experts, options), WORKLOAD)
    together = SimpleNamespace(agree=lambda value, largest=True: value) if ranks else None
    residency, sharded = choose_residency(options, Report(CPU), plan, 40, together, "not asked for")  # type: ignore
    assert not sharded and residency.policy == "stream"
    assert 0 < residency.resident_blocks == plan.resident_blocks < 40


def test_ranks_hold_the_experts_in_parts_where_they_do_not_fit(experts: Parts, room) -> None:
    room(40)
    plan = memory_plan_of(large(experts), WORKLOAD)
    ranks, report = SimpleNamespace(agree=lambda value, largest=True: value), Report(CPU)
    residency, sharded = choose_residency(LARGE, report, plan, 40, ranks, None)  # type: ignore
    assert sharded and residency.policy == "resident" and "in parts" in report.notes[0]
    residency, sharded = choose_residency(LARGE, report, plan, 40, ranks, "compiled")  # type: ignore
    assert not sharded and residency.policy == plan.policy == "swap"
    with pytest.raises(OptionError, match="not available: compiled"):
        choose_residency(replace(LARGE, residency="shard"), report, plan, 40, ranks, "compiled")  # type: ignore


def test_attached_loras_count_in_every_phase(room) -> None:
    room(8)
    loras = tuple(LoraOptions(path=str(path), expert=expert) for expert, path in TINY_LORAS.items())
    options = LoadOptions(model="tiny", loras=loras, residency="swap", lora_mode="attach")
    models = find_models(options)
    settings = resolve_settings(models, options, CPU)
    workload = replace(make_plan(task="t2v-tiny"), latent_shape=(1, 16, 3, 12, 12))
    with_loras = memory_plan_of(settings, workload)
    without = memory_plan_of(replace(settings, loras={}), workload)
    extra = {name: nbytes - without.beside[name] for name, nbytes in with_loras.beside.items()}
    assert lora_bytes(settings.all_loras) > 0
    assert set(extra.values()) == {lora_bytes(settings.all_loras)}
    merged = replace(options, lora_mode="auto")
    assert memory_plan_of(resolve_settings(models, merged, CPU), workload).beside == without.beside

"""Experts whose blocks stream, through the nodes' sockets: LoRAs, eviction, out of memory.

The sockets, the engine and its embedded model are real. ComfyUI's memory manager is replaced by one that does what the
sockets rely on: it loads what it is asked for, and evicts everything when asked to.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.checkpoint.test_gguf import matrices, write
from tests.denoised import Varied
from tools.declared_nodes import modules
from wan_core.checkpoint import load_dit, load_text_encoder, open_checkpoint
from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.lora.read import read_lora
from wan_core.checkpoint.opened import from_state_dict
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import save
from wan_core.config import LoadOptions, LoraOptions, OptionError
from wan_core.execution.memory import planning
from wan_core.execution.memory.planning import RESERVE, TEXT
from wan_core.execution.memory.residency import Residency
from wan_core.execution.memory.streaming import stage_bytes
from wan_core.execution.report import Report
from wan_core.ops.quant.linear import is_attached
from wan_core.pipeline import memory_planning
from wan_core.pipeline.denoise import sample_latents
from wan_core.pipeline.load import finish, load_models
from wan_core.pipeline.loras import Wanted, read_loras
from wan_core.pipeline.memory_planning import memory_plan_of
from wan_core.pipeline.settings import PartToLoad, resolve_settings
from wan_core.pipeline.sources import TINY, find_experts, find_models, recognise
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.plan import make_plan

CPU = torch.device("cpu")
SHAPE = (1, 16, 2, 4, 6)
WORKLOAD = replace(make_plan(task="t2v-tiny", steps=2), latent_shape=SHAPE)


class Manager:
    """ComfyUI's memory manager, as far as the sockets know it."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.room = 1 << 40

    def load_models_gpu(self, models: list[Any], memory_required: float = 0) -> None:
        for model in models:
            if model not in self.loaded:
                model.partially_load(model.load_device)
                self.loaded.append(model)

    def free_memory(self, memory: float, device: torch.device) -> None:
        for model in self.loaded:
            model.detach()
        self.loaded.clear()

    def get_total_memory(self, device: torch.device) -> int:
        return self.room


class Patcher:
    def __init__(self, model: Any, load_device: Any, offload_device: Any, size: int) -> None:
        self.model, self.load_device, self.offload_device, self.size = model, load_device, offload_device, size


@pytest.fixture(scope="module")
def nodes() -> Iterator[SimpleNamespace]:
    stubs, manager = modules(), Manager()
    vars(stubs["comfy.model_patcher"])["ModelPatcher"] = Patcher
    vars(stubs["comfy_execution.utils"])["get_executing_context"] = lambda: None
    vars(stubs["comfy.model_management"]).update(
        get_torch_device=lambda: CPU,
        throw_exception_if_processing_interrupted=lambda: None,
        load_models_gpu=manager.load_models_gpu,
        free_memory=manager.free_memory,
        get_total_memory=manager.get_total_memory,
    )
    before = dict(sys.modules)
    sys.modules.update(stubs)
    try:
        yield SimpleNamespace(
            host=importlib.import_module("nodes.host"),
            memory=importlib.import_module("nodes.memory"),
            sockets=importlib.import_module("nodes.sockets"),
            manager=manager,
        )
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "nodes"]:
            del sys.modules[name]
        for name in stubs:
            sys.modules.pop(name, None)
        sys.modules.update({name: module for name, module in before.items() if name in stubs})


EMBEDDED = {expert: TINY / f"t2v_{expert}.safetensors" for expert in ("high", "low")}


def socket(nodes: SimpleNamespace, residency: str, lora_mode: str = "auto", files: dict[str, Path] = EMBEDDED) -> Any:
    """The socket that the model loader makes."""
    paths = [str(path) for path in files.values()]
    options = LoadOptions(high=paths[0], low=paths[1], residency=residency, lora_mode=lora_mode)
    settings = resolve_settings(find_experts(*paths), options, CPU)
    shared = Residency(CPU, "stream")
    models = {
        name: nodes.host.Held(name, part, lambda module: finish(module, settings, CPU), shared)
        for name, part in settings.parts.items()
    }
    nodes.manager.free_memory(1e30, CPU)
    return nodes.memory.ModelSocket(options, settings, models, None)


def with_loras(model: Any, strength: float) -> Any:
    files = {name: TINY / "lora" / f"t2v_4step_lora_{name}_noise.safetensors" for name in ("high", "low")}
    options = [LoraOptions(path=str(path), expert=name, strength=strength) for name, path in files.items()]
    loras = read_loras(options, model.experts.dit, True)
    return replace(model, loras={name: tuple(wanted) for name, wanted in loras.items()})


def owner_of(model: Any, plan: Any = WORKLOAD) -> Any:
    return importlib.import_module("nodes.memory").ComfyMemory(model, plan, Report(CPU))


def latents(model: Any, on_step: Any = None, owner: Any = None, steps: int = 2) -> torch.Tensor:
    rows = [draw_noise(n, (1, 5, model.experts.dit.text_dim)) for n in (1, 2)]
    owner = owner_of(model) if owner is None else owner
    return sample_latents(
        make_plan(task="t2v-tiny", steps=steps),
        owner,
        Conditioning(cond=rows[0], uncond=rows[1]),
        draw_noise(7, SHAPE),
        model.experts.vae,
        Report(CPU),
        on_step=on_step,
    )


def unloaded(nodes: SimpleNamespace, options: LoadOptions) -> Any:
    """The socket of random experts of a task, of which nothing is loaded."""
    recognised = find_models(options)
    experts = {name: part for name, part in recognised.of.items() if name in ("high", "low")}
    settings = resolve_settings(replace(recognised, of=experts), options, CPU)
    models = {name: nodes.host.Held(name, part) for name, part in settings.parts.items()}
    return nodes.memory.ModelSocket(options, settings, models, None)


@pytest.mark.parametrize("mode", ["sequential", "batched"])
@pytest.mark.parametrize("task", ["t2v-A14B", "animate2-14B", "vace-14B", "s2v-14B", "fun-control-14B"])
def test_nodes_keep_as_many_blocks_as_the_command_line(
    nodes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, task: str, mode: str
) -> None:
    """What a family prepares besides text counts for both doors. Nothing is loaded."""
    model = unloaded(nodes, LoadOptions(model=f"random:{task}", residency="stream", precision="bf16"))
    workload = replace(make_plan(steps=4), latent_shape=(1, 16, 21, 60, 104), guidance_mode=mode)
    room = 30 << 30
    monkeypatch.setattr(memory_planning, "device_room", lambda *_: room)
    monkeypatch.setattr(nodes.host, "room", lambda: room)
    planned = memory_plan_of(model.settings, workload)
    here = nodes.memory.plan_experts(model, workload)
    assert here.beside["high"] == planned.beside["high"] and here.form == planned.form
    assert here.staying_blocks == planned.resident_blocks < model.experts.dit.num_layers


@pytest.mark.parametrize(("share", "stays"), [(0.25, True), (0.75, False)])
def test_blocks_that_stream_stay_while_half_of_the_reserve_is_left(
    nodes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, share: float, stays: bool
) -> None:
    """Under ComfyUI's memory manager as under the engine's own. share: of the reserve, which the steps take."""
    model = unloaded(nodes, LoadOptions(model="random:t2v-A14B", precision="bf16"))
    workload, blocks = replace(make_plan(steps=4), latent_shape=(1, 16, 21, 60, 104)), 20
    now = Residency(CPU, "stream", resident_blocks=blocks, room=1)
    for one in model.patchers.values():
        one.resident_blocks = blocks
    staying = stage_bytes(model.settings.parts["high"].units, blocks)
    taken = nodes.memory.plan_experts(model, workload).beside["high"] + staying
    room = (taken + (1 - share) * RESERVE[0]) / (1 - (1 - share) * RESERVE[1])
    monkeypatch.setattr(memory_planning, "device_room", lambda *_: int(room))
    monkeypatch.setattr(nodes.host, "room", lambda: int(room))
    ours = memory_plan_of(model.settings, workload, held=now)
    here = nodes.memory.plan_experts(model, workload)
    assert ours.staying_blocks == here.staying_blocks
    assert (here.staying_blocks == blocks) == stays


def test_nodes_tell_the_model_how_the_plan_keeps_what_it_prepares(
    nodes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside keys and values in host memory more blocks stay than beside those on the device, which do not fit."""
    path = str(TINY / "driven.safetensors")
    options = LoadOptions(high=path)
    settings = resolve_settings(find_experts(path), options, CPU)
    shared = Residency(CPU, "stream")
    part = settings.parts["high"]
    expert = nodes.host.Held("high", part, lambda module: finish(module, settings, CPU), shared)
    model = nodes.memory.ModelSocket(options, settings, {"high": expert, "low": expert}, None)
    workload = replace(make_plan(task="animate2-tiny", steps=2), latent_shape=(1, 16, 7, 12, 12))
    monkeypatch.setattr(planning, "RESERVE", (0, 0))
    on_device = nodes.memory.plan_experts(model, workload)
    assert on_device.form is not None and on_device.staying_blocks is None and not on_device.form.host
    less = on_device.beside["high"] + stage_bytes(part.units, 0) - 1
    monkeypatch.setattr(nodes.host, "room", lambda: less)
    owner = owner_of(model, workload)
    loaded = owner.acquire("high")
    plan = nodes.memory.plan_experts(model, workload)
    assert plan.form is not None and plan.form.host and loaded.prepared_form == plan.form == expert.kept_form
    assert expert.resident_blocks == plan.staying_blocks and f"memory: {plan.form.words}" in owner.report.notes
    monkeypatch.setattr(nodes.host, "room", lambda: 1 << 40)
    assert owner.acquire("high").prepared_form == on_device.form
    expert.detach()


MODES = ("merge", "attach")


@pytest.mark.parametrize("mode", MODES)
def test_loras_on_blocks_that_stream(nodes: SimpleNamespace, mode: str) -> None:
    """On, weaker, off: the bits of resident weights; and again after everything was evicted."""
    resident, streamed = socket(nodes, "resident", mode), socket(nodes, "stream", mode)
    runs = []
    for strength in (1.0, 0.5, None):
        makes = [one if strength is None else with_loras(one, strength) for one in (resident, streamed)]
        exact = latents(makes[0])
        assert all(one.resident_blocks is None for one in resident.patchers.values())
        nodes.manager.free_memory(1e30, CPU)
        assert torch.equal(latents(makes[1]), exact)
        assert all(one.resident_blocks is not None for one in streamed.patchers.values())
        nodes.manager.free_memory(1e30, CPU)
        assert torch.equal(latents(makes[1]), exact)
        runs.append(exact)
    assert not torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_the_pipeline_and_the_nodes_agree(nodes: SimpleNamespace, mode: str) -> None:
    streamed = with_loras(socket(nodes, "stream", mode), 1.0)
    loras = tuple(LoraOptions(path=str(one.key[0]), expert=name) for name, (one,) in streamed.loras.items())
    exact = latents(streamed)
    options = replace(streamed.options, loras=loras, residency="stream", resident_blocks=2)
    models = load_models(streamed.experts, options, Report(CPU))
    assert torch.equal(latents(streamed, owner=Varied(models.expert)), exact)


@pytest.mark.parametrize("mode", MODES)
def test_out_of_memory_in_a_run_streams_half_and_keeps_the_loras(nodes: SimpleNamespace, mode: str) -> None:
    exact = latents(with_loras(socket(nodes, "resident", mode), 1.0), steps=4)
    model = with_loras(socket(nodes, "auto", mode), 1.0)
    owner = owner_of(model)

    def fail_once(progress: Any, _: float | None) -> None:
        if progress.step.index == 0:
            module = model.patchers["high"].model.content

            def fail(*_: Any) -> None:
                handle.remove()
                raise torch.cuda.OutOfMemoryError("as a test wants it")

            handle = module.blocks[1].register_forward_pre_hook(fail)

    assert torch.equal(latents(model, fail_once, owner, steps=4), exact)
    assert (
        "out of memory, going on with" in owner.report.notes[-1] and "blocks stay, the others" in owner.report.notes[-1]
    )
    attached = sum(map(is_attached, dict(model.patchers["low"].model.content.named_buffers())))
    assert (attached > 0) == (mode == "attach")


@pytest.mark.parametrize("residency", ["resident", "stream"])
def test_packed_weights_are_read_again_where_loras_are_to_be_merged(
    nodes: SimpleNamespace, packed_files: dict[str, Path], residency: str
) -> None:
    """What a LoRA changes is no longer packed then: with another strength the same matrices, off all are packed."""
    model = socket(nodes, residency, "merge", packed_files)
    plain = latents(model)
    for strength in (1.0, 0.5):
        changed = latents(with_loras(model, strength))
        assert torch.equal(changed, latents(with_loras(socket(nodes, residency, "merge", packed_files), strength)))
        assert not torch.equal(changed, plain)
    assert torch.equal(latents(model), plain)


@pytest.fixture(scope="module")
def packed_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packed")
    model = load_dit(TINY / "t2v_high.safetensors", dtype=torch.float32)
    notes = {"num_heads": model.config.num_heads, "text_len": model.config.text_len, "eps": model.config.eps}
    write(folder / "m.gguf", model.state_dict(), matrices("Q8_0"), notes=notes)
    return dict.fromkeys(("high", "low"), folder / "m.gguf")


def test_a_lora_that_has_to_be_merged_is_refused_for_packed_weights_in_a_mapped_file(
    nodes: SimpleNamespace, packed_files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is read, and also when it comes to weights that are there."""
    shapes = expected_shapes(load_dit(TINY / "t2v_high.safetensors").config)
    name = "blocks.0.ffn.0"
    whole = from_state_dict({f"{name}.diff": torch.ones(shapes[f"{name}.weight"])}, "whole")
    loras = {expert: (Wanted(read_lora(whole, shapes), 1.0, ("whole", 0, 0)),) for expert in packed_files}
    monkeypatch.setattr(nodes.memory, "host_room", lambda: 1 << 16)
    for used in (False, True):
        model = socket(nodes, "stream", "merge", packed_files)
        if used:
            latents(model)
        with pytest.raises(OptionError, match=f"whole changes {name}.*mapped file"):
            latents(replace(model, loras=loras))


@pytest.mark.parametrize("small", [True, False])
def test_a_text_encoder_that_does_not_fit_streams(nodes: SimpleNamespace, tmp_path: Path, small: bool) -> None:
    """The rows of one that fits; evicted, nothing of it is left, on the device or in host memory."""
    embedded = load_text_encoder(TINY / "text_encoder.safetensors")
    config = replace(embedded.encoder.config, num_layers=5)
    save(random_module(config, device="cpu", dtype=torch.float32, seed=1), tmp_path / "text.safetensors")
    spiece = open_checkpoint(TINY / "text_encoder.safetensors").read("spiece_model")
    (tmp_path / "spiece.model").write_bytes(spiece.numpy().tobytes())
    part = PartToLoad(recognise(tmp_path / "text.safetensors", "text_encoder", load_text_encoder), torch.float32)
    exact = part.load(CPU)
    residency = Residency(CPU, "stream")
    text = nodes.sockets.TextSocket(nodes.host.Held("text encoder", part, residency=residency))
    fits = part.bytes + TEXT + RESERVE[0]
    nodes.manager.room = int((fits - 1e4 if small else fits + 1e6) / (1 - RESERVE[1]))
    try:
        for prompts in (["a red circle"], ["a blue cross moving up", ""]):
            encoded = text.encode_prompts(prompts)
            for conditioning, rows in zip(encoded, exact.encode(prompts), strict=True):
                [[encoded_rows, _]] = conditioning
                assert encoded_rows.shape == (1, 512, rows.shape[1]), "all that models of ComfyUI attend to"
                assert torch.equal(encoded_rows[0], F.pad(rows, (0, 0, 0, 512 - len(rows))))
            assert [bool(stage.slots) for stage in residency.stages.values()] == [True] * small
            nodes.manager.free_memory(1e30, CPU)
            assert not residency.models and not any(stage.held for stage in residency.stages.values())
    finally:
        nodes.manager.room = 1 << 40


def test_weights_that_do_not_fit_into_host_memory_stay_in_their_file(
    nodes: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The low-noise expert first; a LoRA is merged into the other one alone. What cannot stay there is refused."""
    files = {}
    for name, path in EMBEDDED.items():
        files[name] = tmp_path / f"{name}.safetensors"
        save(load_dit(path, dtype=torch.float32), files[name])
    exact = latents(with_loras(socket(nodes, "resident", "merge", files), 1.0))
    model = with_loras(socket(nodes, "stream", files=files), 1.0)
    one = model.settings.parts["high"].bytes
    experts, weights = model.patchers, model.patchers["high"].residency.host_weights

    def room_left() -> int:
        return int(1.5 * one) - sum(u.layout.nbytes for w in weights.values() for u in w.units if u.memory is not None)

    monkeypatch.setattr(nodes.memory, "host_room", room_left)
    monkeypatch.setattr(memory_planning, "UNPLANNED", 0)  # the embedded model has megabytes
    streamed = latents(model)
    pinned = {name: all(unit.memory is not None for unit in weights[name].units) for name in experts}
    assert pinned == {"high": True, "low": False}
    attached = {n: any(map(is_attached, dict(h.residency.models[n].named_buffers()))) for n, h in experts.items()}
    assert attached == {"high": False, "low": True}
    torch.testing.assert_close(streamed, exact, atol=2e-4, rtol=1e-3)
    assert torch.equal(latents(model), streamed)
    monkeypatch.setattr(nodes.memory, "host_room", lambda: one // 2)
    with pytest.raises(OptionError, match="GiB are available"):  # of 16 bits, and computed in 32
        latents(socket(nodes, "stream"))

    def release(nbytes: int) -> None:
        monkeypatch.setattr(nodes.memory, "host_room", lambda: nbytes)

    monkeypatch.setattr(sys.modules["comfy.model_management"], "ensure_pin_budget", release, raising=False)
    latents(socket(nodes, "stream"))  # ComfyUI's models release what they pinned

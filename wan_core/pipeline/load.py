"""Load: from recognised files to the models of a run, ready to compute.

The one way for the command line, worker processes and ComfyUI: `resolve_settings` (what the options mean here), a
memory plan, `load_parts`, `finish`. ComfyUI's nodes call these one by one, because its memory manager decides when a
model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn

from wan_core.checkpoint import load_vae
from wan_core.checkpoint.staged import USUAL, Reading
from wan_core.config import EXACT, LoadOptions, OptionError
from wan_core.execution.memory.planning import MemoryPlan
from wan_core.execution.memory.residency import Residency
from wan_core.execution.optimize import compilations, optimize, optimize_vae
from wan_core.execution.report import Report
from wan_core.models.text.umt5 import PromptCache, TextEncoder
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.vision.clip import VisionEncoder
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import Task
from wan_core.models.wan.model import WanModel
from wan_core.ops.kernels import fused
from wan_core.parallel.conditioning import text_rank
from wan_core.parallel.layers import stage_layers
from wan_core.parallel.mesh import RankMesh
from wan_core.parallel.sequence import check_lse
from wan_core.parallel.weights import QUANTIZED, load_sharded_dit, shared_checkpoint
from wan_core.pipeline.applied_loras import ModelLoras, load_with_loras, merged_of
from wan_core.pipeline.first_use import FirstUse, prepares
from wan_core.pipeline.loras import lora_files, notes_of, shared
from wan_core.pipeline.memory_planning import (
    HostPlan,
    check_host,
    check_prepared,
    choose_residency,
    host_room,
    memory_plan_of,
    plan_host,
    plans_memory,
    staying_in_file,
)
from wan_core.pipeline.model_folders import vae_in
from wan_core.pipeline.model_parts import Part, Parts, is_packed
from wan_core.pipeline.reading import load_parts
from wan_core.pipeline.settings import ModelSettings, choose_device, compute_dtype, resolve_settings
from wan_core.pipeline.sources import TINY, recognise
from wan_core.sampling.build import ModelFacts
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import LoraShare

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Models:
    """Everything a run needs, held by `residency`. `high` and `low` are one module where there is one transformer."""

    settings: ModelSettings
    residency: Residency
    plans: bool  # memory is planned, as on every GPU
    waits: HostPlan  # where weights wait that do not stay on the device
    sharded: bool = False  # ranks hold the experts in parts
    layers: range | None = None  # the blocks of a transformer that this rank holds; None: all
    ranks: RankMesh | None = None  # that run it together
    first_use: FirstUse | None = None  # of kernels, which goes on beside loading and encoding
    on_model: dict[str, ModelLoras] = field(default_factory=dict)  # by transformer, of those that have LoRAs
    prompts: PromptCache = field(default_factory=PromptCache)  # encoded ones: a text encoder may have to be read anew

    @property
    def device(self) -> torch.device:
        return self.residency.device

    @property
    def task(self) -> Task:
        return self.settings.recognised.task

    @property
    def attention(self) -> str:
        return self.settings.attention

    @property
    def facts(self) -> ModelFacts:
        return self.settings.recognised.facts(lora_files(self.settings.options.loras))

    @property
    def shares(self) -> bool:
        """Whether each rank reads a part of every file, and has the rest from the others."""
        return self.ranks is not None and self.residency.policy == "resident"

    def read(self, name: str, how: Reading) -> nn.Module:
        settings, ranks, part = self.settings, self.ranks, self.settings.parts[name]
        config = part.part.config
        if self.sharded and ranks is not None and part.part.path is not None and isinstance(config, DiTConfig):
            return load_sharded_dit(part.part.path, ranks, part.dtype, config.family, how.turn)
        layers = self.layers if isinstance(config, DiTConfig) else None  # ranks read different blocks: none is shared
        alone = name == "text_encoder" or layers is not None
        share = partial(shared_checkpoint, ranks=ranks, turn=how.turn) if ranks and self.shares and not alone else None
        stays = name in self.waits.mapped
        how = replace(how, mapped=how.mapped or stays, stays=stays, layers=layers, share=share)
        loras = settings.loras.get(name, ())
        return load_with_loras(part, loras, self.residency.load_device, settings.device, how)

    def add(self, name: str, model: nn.Module, report: Report) -> None:
        """Attach the LoRAs of a model that was read, optimise it, give it to the residency."""
        settings, part, loras = self.settings, self.settings.parts[name], self.settings.loras.get(name, ())
        if loras:
            self.on_model[name] = ModelLoras(settings.device, merged_of(part, loras))
            if part.lora_mode == "attach":
                self.on_model[name].apply(cast(WanModel, model), shared(loras, name, ()), part)
        report.notes += [f"{name}: {one.words(part.lora_words)}" for one in loras]
        model = finish(model, settings, settings.device, ranks=self.ranks)
        self.residency.add(name, model, self.waits.waits(name))

    def expert(self, name: str) -> WanModel:
        """Ready on the device. A task with a single transformer has it as `high`, whichever is asked for."""
        if self.first_use is not None:
            self.first_use.thread.join()
        return cast(WanModel, self.residency.use(name if name in self.residency.models else "high"))

    def check_changes(self, plan: Plan) -> None:
        """Raise OptionError for a plan that changes LoRAs, where they are merged into weights that stay packed."""
        parts = [self.settings.parts[name] for name in self.on_model]
        merged = any(part.lora_mode == "merge" and is_packed(part.quantization) for part in parts)
        if merged and any(step.loras for step in plan.steps):
            raise OptionError(
                "LoRAs change their strength during this run, and merged into weights that stay packed they cannot: "
                "attach them (--lora-mode attach), or load in another precision"
            )

    def change_loras(self, name: str, loras: Sequence[LoraShare], report: Report) -> None:
        """Have the LoRAs of an expert at these shares of their strengths. A change takes a phase of the report."""
        name = name if name in self.settings.parts else "high"
        if name not in self.on_model:
            return
        applied, part = self.on_model[name], self.settings.parts[name]
        wanted = shared(self.settings.loras.get(name, ()), name, loras)
        if applied.has(wanted, part):
            return
        model = cast(WanModel, self.residency.models[name])
        with report.phase(f"LoRAs {name}"):
            applied.apply(model, wanted, part, partial(self.residency.forget_copies, name))

    def fits(self, ranks: RankMesh) -> bool:
        """Whether `ranks` can share these: experts that are held in parts belong to the mesh that loaded them."""
        assert self.ranks is not None
        loaded, mesh = self.ranks.mesh, ranks.mesh
        return loaded == mesh or (not self.sharded and loaded.layers == mesh.layers == 1)

    def at_speed(self, speed: str, ranks: RankMesh | None = None) -> Models:
        """The same models for runs at a word of `speed`; `self` is not to be used again. ranks: those that share them
        from now on; None: as before. Raises AttentionError."""
        settings, ranks = self.settings.at_speed(speed), ranks or self.ranks
        if settings.attention != self.settings.attention or ranks is not self.ranks:
            for model in self.residency.models.values():
                if isinstance(model, WanModel):
                    finish(model, settings, self.device, ranks=ranks)
        return replace(self, settings=settings, ranks=ranks)

    @property
    def compiles(self) -> bool:
        """Whether the next forward is the first of this process to compile blocks."""
        return self.settings.options.compile != "off" and compilations() == 0

    def wait_for_kernels(self, report: Report) -> None:
        """Wait for kernels that are prepared beside loading. Call it where no rank waits for another on a GPU."""
        if self.first_use is not None:
            self.first_use.wait(report)

    def place(self, plan: Plan) -> MemoryPlan | None:
        """Move the models to where `plan` needs them: another size may take another plan than the one they were
        loaded by. None on a CPU, and where ranks hold parts of the experts."""
        if not self.plans or self.sharded or self.layers is not None:
            return None
        memory = memory_plan_of(self.settings, plan, held=self.residency)
        residency, limit = self.residency, self.settings.options.host_memory_limit
        form = memory.form if self.ranks is None else None
        check_prepared(form, residency.kept_form, residency.weights_in_host_memory(), limit)
        room = memory.room if memory.together else None
        residency.follow(memory.policy, memory.resident_blocks, room, memory.beside, memory.streams_text, form)
        return memory

    def text_encoder(self) -> TextEncoder:
        return cast(TextEncoder, self.residency.use("text_encoder"))

    def vae(self) -> VideoVAE:
        return cast(VideoVAE, self.residency.use("vae"))

    def clip_vision(self) -> VisionEncoder:
        """The CLIP vision encoder, for tasks that take features of the image."""
        return cast(VisionEncoder, self.residency.use("clip_vision"))

    @property
    def speech(self) -> Part:
        speech = self.settings.recognised.speech
        assert speech is not None
        return speech

    @property
    def vae_config(self) -> VAEConfig:
        return self.settings.recognised.vae

    @property
    def dit_config(self) -> DiTConfig:
        return self.settings.recognised.dit


def load_models(
    parts: Parts,
    options: LoadOptions,
    report: Report,
    plan: Plan | None = None,
    ranks: RankMesh | None = None,
    how: Reading = USUAL,
) -> Models:
    """Load what was recognised, or the transformers alone. plan: what memory is planned for (None: the task's own
    size). ranks: those that load and run it together. how: files are read. Raises OptionError or AttentionError for
    what cannot run here, before any weights are read."""
    speed = EXACT if plan is None else plan.speed
    models = place_weights(resolve_settings(parts, options, report.device, speed), report, plan, ranks)
    names = [name for name in parts.of if name != "text_encoder" or ranks is None or ranks.rank == text_rank(ranks)]
    if ranks is not None and prepares(models.settings):
        models = replace(models, first_use=FirstUse(models.settings))
    loaded = load_parts(names, models.read, report.device, in_order=models.shares, how=how)
    for name in names:
        models.add(name, loaded.pop(name), report)
    note_models(models, report)
    return models


def place_weights(settings: ModelSettings, report: Report, plan: Plan | None, ranks: RankMesh | None) -> Models:
    """Plan memory, and choose where weights are held, before any are read. Raises OptionError where they do not fit."""
    options, num_layers = settings.options, settings.recognised.dit.num_layers
    if settings.device.type == "cpu":
        check_host(settings.parts, host_room(options.host_memory_limit))
    layers = None if ranks is None or ranks.layers.size == 1 else stage_layers(num_layers, ranks)
    plans = plans_memory(settings)
    memory = memory_plan_of(settings, plan, layers) if plans and options.residency != "shard" else None
    waits = HostPlan()
    if memory is not None and memory.policy != "resident" and ranks is None:
        prepared = None if plan is None else memory.form
        waits = plan_host(settings.parts, host_room(options.host_memory_limit), prepared)
        mapped = {n: staying_in_file(settings.parts[n], settings.loras.get(n, ())) for n in waits.mapped}
        settings = replace(settings, parts={**settings.parts, **mapped})
        if mapped:  # attached LoRAs take memory of the device
            memory = memory_plan_of(settings, plan, layers)
    why_not = why_not_sharded(settings, ranks)
    residency, sharded = choose_residency(options, report, memory, num_layers, ranks, why_not)
    if layers is not None:
        check_parts(settings, residency, sharded)
    return Models(settings, residency, plans, waits, sharded, layers, ranks)


def note_models(models: Models, report: Report) -> None:
    """Say in the report what was loaded, and warn of files that may be the wrong ones."""
    settings, ranks, parts = models.settings, models.ranks, models.settings.recognised
    report.notes += models.residency.notes
    if settings.device.type == "cuda" and (reason := fused.why_not(settings.device)) is not None:
        report.notes.append(f"fused kernels: {reason}. {fused.WITHOUT}")
    for note in (*parts.notes, *notes_of(settings.loras)):
        report.warn(note)
        if ranks is None or ranks.rank == 0:
            log.warning("%s", note)
    if parts.why:
        report.notes.append(f"task: {parts.task.name} ({parts.why})")
    report.settings |= settings.describe()


def check_parts(settings: ModelSettings, residency: Residency, sharded: bool) -> None:
    """Raise OptionError where ranks cannot hold whole blocks of the experts, a part of them each."""
    why = None
    if residency.policy != "resident" or sharded:
        why = f"its blocks stay on the GPUs, and residency {'shard' if sharded else residency.policy!r} was chosen"
    elif is_packed(settings.quantization):
        why = "weights that stay packed (GGUF) are not read in parts"
    elif settings.all_loras:
        why = "LoRAs are not read in parts: leave them out"
    if why is not None:
        raise OptionError(f"the layer pipeline does not go with this run; {why}, or use another mesh")


def why_not_sharded(settings: ModelSettings, ranks: RankMesh | None) -> str | None:
    """Why ranks cannot hold the experts in parts; None where they can."""
    high = settings.parts["high"].part
    if ranks is None or ranks.sequence.size == 1:
        return "weights are sharded over the ranks of one sequence: use several GPUs, and a mesh other than 2x1x1"
    if settings.quantization is not None or high.scaled:
        return QUANTIZED
    if settings.options.compile != "off":
        return "torch cannot compile blocks whose weights are gathered during the forward: leave compile off"
    if high.path is None:
        return "sharding reads parts of files: random weights have no file"
    if settings.all_loras:
        return "LoRAs are summed into whole matrices, or attached to them: leave them out, or hold the experts whole"
    return None


def finish(
    model: nn.Module,
    settings: ModelSettings,
    device: torch.device,
    *,
    ranks: RankMesh | None = None,
) -> nn.Module:
    """Optimise a loaded model, in place, for where it will run. Again with other `ranks`: they share it from now on."""
    if isinstance(model, WanModel):
        if ranks is not None:
            check_lse(settings.attend.gives_lse, settings.attention, ranks.mesh)
        return optimize(
            model,
            attend=settings.attend,
            compile=settings.options.compile,
            device=device,
            ranks=ranks,
        )
    return optimize_vae(model, device, ranks) if isinstance(model, VideoVAE) else model


def load_vae_only(
    model: str | None, vae: str | None, device: str, precision: str, channels: int
) -> tuple[VideoVAE, torch.device]:
    """The VAE of a release or a file, for decoding saved latents of so many channels."""
    where = choose_device(device)
    if vae is None and model is None:
        raise OptionError("no VAE given: use --vae FILE, --model FOLDER of a release, or --model tiny")
    path = vae or (TINY / "vae.safetensors" if model == "tiny" else vae_in(str(model), channels))
    if path is None:
        raise OptionError(f"no VAE found in {model}: add --vae FILE")
    part = recognise(Path(path), "vae", load_vae)
    loaded = cast(VideoVAE, part.load(where, compute_dtype(precision, where), None))
    return optimize_vae(loaded, where), where

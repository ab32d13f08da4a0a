"""The experts of a task under ComfyUI's memory manager: what is loaded, what streams, and who leaves for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from torch import Tensor

from wan_core.config import LoadOptions
from wan_core.execution.memory.planning import MemoryPlan, Placed, Sizes, plan_memory
from wan_core.execution.memory.residency import KEPT_FREE
from wan_core.execution.optimize import set_attention
from wan_core.execution.report import GIB, Report
from wan_core.media.preview import RGBMap
from wan_core.models.wan.config import PreparedForm
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.comfy_conditioning import check_latents
from wan_core.pipeline.denoise import sample_latents
from wan_core.pipeline.loras import Wanted, lora_bytes, shared
from wan_core.pipeline.memory_planning import beside_plan, check_fits, check_prepared, host_room, plan_host
from wan_core.pipeline.model_parts import Parts, is_packed
from wan_core.pipeline.run import OnStep, RunOwner
from wan_core.pipeline.settings import ModelSettings
from wan_core.sampling.build import ModelFacts
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import BlockChecks
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.run import check_kernel
from wan_core.sampling.start import Leftover, Start
from wan_core.sampling.steps import Expert, LoraShare

from . import host


@dataclass(frozen=True, eq=False)
class ModelSocket:
    """One or two experts, not loaded before they are used. `options`: what the user chose; workers load by them.
    `settings`: what that means on the device. `pace`: seconds per forward of the last run."""

    options: LoadOptions
    settings: ModelSettings
    patchers: Mapping[Expert, host.Held]  # both are one where a single transformer runs every step
    rgb: RGBMap | None
    pace: dict[Expert, float] = field(default_factory=dict)
    loras: Mapping[str, tuple[Wanted, ...]] = field(default_factory=dict)  # by expert
    shift: float | None = None  # that came with the model; None: the task's own
    range_shift: float | None = None  # of a MODEL, with which ranges of texts are sigmas; None: that of the run
    named_loras: bool = True  # False where they came with a MODEL, which does not say what they are
    kernels: str | None = None  # those that are being prepared, see `host.prepare_kernels`

    @property
    def experts(self) -> Parts:
        return self.settings.recognised

    @property
    def facts(self) -> ModelFacts:
        """What a plan depends on."""
        return self.experts.facts(self.lora_files, self.named_loras)

    @property
    def patcher(self) -> host.Held:
        """By this ComfyUI's cache of results sees that an output holds a model (--cache-ram lets old ones go first)."""
        return self.patchers["high"]

    @property
    def lora_files(self) -> list[Path]:
        """Those that count for something."""
        return [Path(one.key[0]) for expert_loras in self.loras.values() for one in expert_loras if one.strength]

    def at_speed(self, speed: str) -> ModelSocket:
        """The same models for runs at a word of `speed`. Raises AttentionError."""
        return replace(self, settings=self.settings.at_speed(speed))

    def loras_of(self, expert: Expert) -> tuple[Wanted, ...]:
        return self.loras.get(expert if self.experts.low else "high", ())

    def read_ahead(self) -> None:
        """Begin to read the experts, where everything fits beside them."""
        if self.options.residency in ("auto", "resident"):
            patchers = {
                name: one for name, one in self.patchers.items() if name == "high" or one is not self.patchers["high"]
            }
            host.read_ahead(list(patchers.values()), [self.loras_of(name) for name in patchers])

    def check(self, plan: Plan, shape: tuple[int, ...]) -> None:
        """Raise OptionError, before anything of this size is made, for latents [B, C, T, Y, X] that cannot run."""
        check_latents(shape, self.experts.dit, self.experts.task.name)
        room = host.spare_bytes() if host.device().type == "cpu" else None
        check_fits(self.settings, replace(plan, latent_shape=shape), room)
        if plan.sparse is not None:
            dit = self.experts.dit
            tokens = dit.tokens(*shape[2:])
            check_kernel(plan.sparse, self.settings.attention, host.device(), dit.head_dim, tokens)

    def sample(self, run: Sampling, on_step: OnStep, on_leftover: Callable[[Leftover], None]) -> Tensor:
        """Un-normalised latents, see `wan_core.pipeline.denoise.sample_latents`."""
        vae = self.experts.vae
        run.report.notes += run.notes
        return sample_latents(
            run.plan,
            ComfyMemory(self, run.plan, run.report),
            run.conditioning,
            run.start.sample(run.plan, vae, host.device()),
            vae,
            run.report,
            start=run.start,
            on_step=on_step,
            on_leftover=on_leftover,
            checks=BlockChecks(host.check_interruption),
        )


@dataclass(frozen=True)
class Sampling:
    """A run of the sampler. `notes`: of its report, where this process runs it; workers say what holds there."""

    plan: Plan
    conditioning: Conditioning
    start: Start
    report: Report
    notes: Sequence[str]


def plan_experts(model: ModelSocket, plan: Plan) -> MemoryPlan:
    """The memory plan of the experts alone, made as on the command line. Blocks that stream now stay so where that
    fits."""
    high, settings = model.patchers["high"], model.settings
    attached = [name for name in settings.parts if model.patchers[cast(Expert, name)].part.lora_mode == "attach"]
    loras = lora_bytes(one for name in attached for one in model.loras.get(name, ()))
    beside = beside_plan(settings.recognised, plan, settings.per_token(), settings.dtype.itemsize, loras)
    sizes = Sizes(units=high.part.units, experts=1, text_encoder=0, vae=0)
    free = host_room()
    host_memory = None if free is None else free + waiting_bytes(model)
    residency = model.options.residency  # where no blocks stream, weights are on the device alone
    mode = residency if residency in ("auto", "stream") else "resident"
    blocks = None if mode == "resident" else high.resident_blocks
    placed = None if blocks is None else Placed(policy="stream", resident_blocks=blocks)
    return plan_memory(sizes, beside, host.room(), mode, placed=placed, host=host_memory, kept=high.kept_form)


def waiting_bytes(model: ModelSocket) -> int:
    """Bytes of weights that wait in host memory, or in their files."""
    return sum(one.part.bytes for one in set(model.patchers.values()) if one.in_host_memory)


class ComfyMemory(RunOwner):
    """The experts of one run under ComfyUI's memory manager."""

    def __init__(self, model: ModelSocket, plan: Plan, report: Report) -> None:
        super().__init__(report)
        self.model, self.run_plan, self.patchers = model, plan, model.patchers
        self.shares: dict[str, Sequence[LoraShare]] = {}  # of each expert, in its first phase until it is acquired
        for step in reversed(plan.steps):
            self.shares[step.expert] = step.loras

    def acquire(self, expert: Expert, loras: Sequence[LoraShare] = ()) -> WanModel:
        """The expert, on the device; a load is timed as a phase of the report."""
        model, report, patcher = self.model, self.report, self.patchers[expert]
        self.shares[expert] = loras
        plan, expert_loras, residency = self.plan(), self.loras(expert), model.options.residency
        together = list(dict.fromkeys(self.patchers.values())) if residency == "resident" else [patcher]
        memory, blocks = plan.beside[expert], plan.staying_blocks
        if blocks is not None:
            report.notes += self._plan_host(plan.form)
        else:
            check_prepared(plan.form, patcher.kept_form, waiting_bytes(model))
        if plan.form is not None and plan.form.host:
            report.notes.append(f"memory: {plan.form.words}")
        for name, one in self.patchers.items():
            # What is being read goes on, and is changed when it is there, unless weights that stay packed forbid it.
            begun = one.ahead is not None and not is_packed(one.part.quantization)
            one.expect(model.loras_of("low" if name == "low" else "high") if begun else self.loras(name))
            if blocks is not None:
                one.stream(blocks)
        if (residency == "swap" or blocks is not None) and not patcher.is_loaded:
            host.evict_all()
        loaded = all(one.is_loaded for one in together)
        if loaded and patcher.has_loras(expert_loras):
            host.load(together, memory)
            return self._ready(expert, plan.form)
        host.show(f"{'LoRAs of' if loaded else 'loading'} the {patcher.name} ...")
        with report.phase(f"load {expert}"):
            host.load(together, memory)
            host.background.wait(model.kernels)
            return self._ready(expert, plan.form)

    def loras(self, expert: str) -> tuple[Wanted, ...]:
        """Those of an expert, at the strengths of its phase."""
        name: Expert = "low" if expert == "low" else "high"
        return shared(self.model.loras_of(name), name, self.shares.get(name, ()))

    def make_room(self, name: str) -> str | None:
        """Everyone else leaves, and half of the blocks that stayed stream; None where no more can stream."""
        expert = cast(Expert, name)
        patcher = self.patchers[expert]
        blocks = len(patcher.part.units) - 1
        stay = blocks if patcher.resident_blocks is None else patcher.resident_blocks
        if not stay:
            return None
        for one in self.patchers.values():
            one.stream(stay // 2)
        host.evict_all()
        plan = self.plan()
        host.load([patcher], plan.beside[expert])
        self._ready(expert, plan.form)
        return f"other models left the device, {stay // 2} of {blocks} blocks stay, the others stream"

    def plan(self) -> MemoryPlan:
        """With the host memory that ComfyUI's models pin and weights to be read need."""
        distinct = set(self.patchers.values())
        to_read = sum(one.part.bytes for one in distinct if not (one.is_loaded or one.in_host_memory))
        host.release_pinned(int(to_read / (1 - KEPT_FREE)))
        return plan_experts(self.model, self.run_plan)

    def _ready(self, expert: Expert, form: PreparedForm | None) -> WanModel:
        """The loaded model of an expert. form: how it keeps what it prepares once a run."""
        patcher = self.patchers[expert]
        model = patcher.ready(self.loras(expert))
        patcher.kept_form = model.prepared_form = form
        set_attention(model, self.model.settings.attend)  # which the run before may have changed
        return model

    def _plan_host(self, prepared: PreparedForm | None) -> list[str]:
        """Decide where weights wait that are about to be read and streamed, beside what a run prepares; says which are
        not pinned. Raises OptionError where they do not fit into host memory."""
        parts = self.model.settings.parts
        parts = {name: part for name, part in parts.items() if not self.patchers[cast(Expert, name)].in_host_memory}
        new = None if prepared is None or prepared.uses_again(self.patchers["high"].kept_form) else prepared
        plan = plan_host(parts, host_room(), new)
        for name, part in parts.items():
            self.patchers[cast(Expert, name)].wait(part, plan.waits(name))
        return [
            f"{name}: host memory is short: {pinned / GIB:.1f} GiB of the weights are pinned, the others are read from "
            "their file while the device computes"
            for name, pinned in sorted(plan.mapped.items())
        ]

"""One request on models that are ready: what every stage of it works on, who holds the models meanwhile, and the
callbacks that it calls."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from wan_core.config.host_memory import available_bytes
from wan_core.execution.report import Report
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families import family_of
from wan_core.models.wan.families.family import Family
from wan_core.models.wan.model import WanModel
from wan_core.parallel.mesh import RankMesh
from wan_core.pipeline.check import Job, never_seen, size_notes
from wan_core.pipeline.load import Models
from wan_core.pipeline.memory_planning import check_fits
from wan_core.pipeline.model_parts import Parts
from wan_core.sampling.denoise import BlockChecks, Owner, Progress
from wan_core.sampling.guided import choose_batched
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.run import check_kernel
from wan_core.sampling.steps import Expert, LoraShare

log = logging.getLogger(__name__)
Module = TypeVar("Module")
OnStep = Callable[[Progress, float | None], None]
"""Called after every step: what was done, and the seconds of a forward in the newest finished step that ran any (None
before the first)."""

COMPILING = "compile in the first step"  # a phase that nothing can stop


def nothing(*_: Any) -> None:
    pass


class WriteVideo(Protocol):
    """Writes frames uint8 [H, W, 3] of a video that is made by these settings."""

    def __call__(self, frames: Iterator[np.ndarray], /, *, fps: int, settings: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Callbacks of a run, called from any thread of this process, and what it keeps. `step` and `checks` may raise to
    interrupt.

    found: the models that will be loaded, and what will be made. read: so many bytes more were read. loaded: the models
    are there. planned: what will run, after every check. phase: the name of a phase that begins. latents: the finished
    ones, before they are decoded. kept: where they were written. checks: called between blocks. write: is given the
    frames while later ones are decoded, in a thread of its own.

    keep_latents: finished latents are written there before they are decoded, and stay; if that fails, a warning and a
    note of the report say so, and they are decoded all the same. must_keep: refuse, before weights are read, a video
    whose latents cannot be kept. keep_clips: a folder for the latents of finished steps and clips; a later run of the
    same video goes on from them. `keep_latents` and `latents` are for latents of one video (`Job.one_video`).
    """

    found: Callable[[Parts, Plan | None], None] = nothing
    read: Callable[[int], None] = nothing
    loaded: Callable[[], None] = nothing
    planned: Callable[[Plan], None] = nothing
    phase: Callable[[str], None] = nothing
    step: OnStep | None = None
    latents: Callable[[Tensor], None] = nothing
    kept: Callable[[Path], None] = nothing
    checks: BlockChecks | None = None
    write: WriteVideo | None = None
    keep_latents: Path | None = None
    must_keep: bool = False
    keep_clips: Path | None = None


SILENT = Watch()


class RunOwner(Owner, ABC):
    """Goes on by a cheaper plan where memory runs out, once in a run."""

    def __init__(self, report: Report) -> None:
        self.report, self.relieved = report, False

    @abstractmethod
    def make_room(self, name: str) -> str | None:
        """Go over to the next plan with less device memory, and bring `name` back. In words; None: there is none."""

    def relieve(self, name: str) -> bool:
        """Memory ran out with the model `name`: make room, and say so; False if there is none. Steps are not lost."""
        cheaper = None if self.relieved else self.make_room(name)
        if cheaper is None:
            return False
        self.relieved = True
        note = f"out of memory, going on with what takes less ({cheaper}); nothing that was finished is lost"
        logging.getLogger("WanCore").warning("%s", note)
        self.report.notes.append(note)
        return True


class OwnMemory(RunOwner):
    """Models under a `Residency`. With ranks, out of memory is an error: the others would wait for a repeated step."""

    def __init__(self, models: Models, report: Report) -> None:
        super().__init__(report)
        self.models = models

    def fetch(self, name: str, use: Callable[[], Module]) -> Module:
        """A model ready on the device. Where models take turns, bringing it there is a phase of its own."""
        if self.models.residency.policy == "resident":
            return use()
        with self.report.phase(f"fetch {name}"):
            return use()

    def acquire(self, expert: Expert, loras: Sequence[LoraShare] = ()) -> WanModel:
        self.models.change_loras(expert, loras, self.report)
        return self.fetch(expert, lambda: self.models.expert(expert))

    def make_room(self, name: str) -> str | None:
        residency = self.models.residency
        name = name if name in residency.models else "high"
        cheaper = None if self.models.ranks is not None else residency.cheaper(name)
        if cheaper is not None:
            residency.use(name)
        return cheaper


@dataclass(frozen=True)
class Run:
    """One request on models placed for it. report: of this run and of loading. memory: its owner of the models."""

    models: Models
    job: Job
    report: Report
    memory: OwnMemory

    @property
    def family(self) -> Family:
        return family_of(self.job.task)

    def vae(self) -> VideoVAE:
        """The VAE, ready on the device."""
        return self.memory.fetch("vae", self.models.vae)

    def warn(self, note: str) -> None:
        """Add a note that a user should see to the report, and log it."""
        self.report.warn(note)
        if self.models.ranks is None or self.models.ranks.rank == 0:
            log.warning("%s", note)


def begin(models: Models, job: Job, report: Report) -> Run:
    """Place `models` for a checked request, and check what depends on where they run. Raises OptionError."""
    models.check_changes(job.plan)
    streamed = models.residency.policy == "stream"
    mode, why = guidance_mode(job.request.guidance_mode, job.plan, models.ranks, streamed)
    plan = replace(job.plan, guidance_mode=mode)
    job = replace(job, plan=plan)
    memory_plan = models.place(plan)
    if memory_plan is not None:
        report.settings["memory"] = memory_plan.as_dict()
    report.settings |= {**job.settings(), "attention": models.attention, "residency": models.residency.policy}
    if models.ranks is not None:
        report.settings["mesh"] = str(models.ranks.mesh)
        report.notes.append(f"ranks: {models.ranks.mesh.describe()}")
    report.notes.append(f"guidance: {mode} ({why})")
    run = Run(models, job, report, OwnMemory(models, report))
    for warning in plan.warnings:  # which were said before anything was loaded
        report.warn(warning)
    for note in [*never_seen(job), *size_notes(job.task, models.vae_config, job.width, job.height)]:
        run.warn(note)
    if models.ranks is None:
        room = available_bytes(swap=True) if models.device.type == "cpu" else None
        check_fits(models.settings, plan, room)
    if plan.sparse is not None:
        check_kernel(plan.sparse, models.attention, models.device, models.dit_config.head_dim, plan.tokens)
    return run


def guidance_mode(asked: str, plan: Plan, ranks: RankMesh | None, streamed: bool = False) -> tuple[str, str]:
    """How the guidance branches of `plan` run, and why. streamed: blocks come from host memory for every forward."""
    if ranks is not None and plan.guided and ranks.cfg.size > 1:
        return "parallel", "each branch has ranks of its own"
    if ranks is not None and plan.guided and ranks.layers.size > 1:
        return "sequential", "the branches follow each other through the layers"
    batched, why = choose_batched(asked, plan, plan.tokens, streamed)
    return "batched" if batched else "sequential", why

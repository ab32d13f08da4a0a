"""One request on models that are ready: what every stage of it works on, and the callbacks that it calls meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from wan_core.execution.report import Report
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families import family_of
from wan_core.models.wan.families.family import Family
from wan_core.parallel.mesh import RankMesh
from wan_core.pipeline.check import Job, check_tensor, never_seen, size_notes
from wan_core.pipeline.load import Models
from wan_core.pipeline.memory_planning import Workload
from wan_core.pipeline.model_parts import Parts
from wan_core.pipeline.own_memory import OwnMemory
from wan_core.sampling.denoise import Progress
from wan_core.sampling.pace import BlockChecks
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.run import check_kernel

log = logging.getLogger(__name__)
OnStep = Callable[[Progress, float | None], None]
"""Called after every step: what was done, and the seconds of a forward in the newest finished step that ran any (None
before the first)."""


def nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Callbacks of a run, called from any thread of this process. `step` and `checks` may raise to interrupt.

    found: the models that will be loaded, and what will be made. read: so many bytes more were read. loaded: the models
    are there. planned: what will run, after every check. phase: the name of a phase that begins. latents: the finished
    ones, before they are decoded. kept: where they were written. checks: called between blocks.
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


SILENT = Watch()


@dataclass(frozen=True)
class Run:
    """One request on models that are placed for it. report: of this run, and of loading before it. memory: its owner of
    the models."""

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
    job = job.streamed() if models.residency.policy == "stream" else job
    memory_plan = models.place(Workload.of(job))
    if memory_plan is not None:
        report.settings["memory"] = memory_plan.as_dict()
    report.settings |= {**job.settings(), "attention": models.attention, "residency": models.residency.policy}
    if models.ranks is not None:
        report.settings["mesh"] = str(models.ranks.mesh)
        report.notes.append(f"ranks: {models.ranks.mesh.describe()}")
        if (over_ranks := guidance_over(models.ranks, job.plan)) is not None:
            report.settings["guidance_mode"], why = over_ranks
            job = replace(job, batched=False, batched_why=why)
    report.notes.append(f"guidance: {'batched' if job.batched else 'sequential'} ({job.batched_why})")
    run = Run(models, job, report, OwnMemory(models, report))
    for note in [*never_seen(job), *size_notes(job.task, models.vae_config, job.width, job.height)]:
        run.warn(note)
    if models.ranks is None:
        dit, itemsize = models.dit_config, models.settings.dtype.itemsize
        check_tensor("an activation", (job.tokens, dit.dim), itemsize, models.device)
    if job.plan.sparse is not None:
        check_kernel(job.plan.sparse, models.attention, models.device, models.dit_config.head_dim, job.tokens)
    return run


def guidance_over(ranks: RankMesh | None, plan: Plan) -> tuple[str, str] | None:
    """How ranks run the guidance branches of `plan` together, and why, for the report; None where each forward is of
    all ranks, and may have both branches."""
    if ranks is not None and plan.guided and ranks.cfg.size > 1:
        return "parallel", "each branch has ranks of its own"
    if ranks is not None and plan.guided and ranks.layers.size > 1:
        return "sequential", "the branches follow each other through the layers"
    return None

"""Have a run's first step behind you: one forward of each expert at the size that will be asked for.

That loads kernels, compiles blocks, calibrates the cuDNN and cuBLAS choices of this very size, and brings the weights
where they will be. One step per expert, because steps are few before the change of experts at a large shift: a warm-up
of the first two would never reach the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from wan_core.config import Request
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.rehearsal import forward_once
from wan_core.pipeline.resolved_request import Job
from wan_core.sampling.denoise import retried
from wan_core.sampling.plan import Expert


@torch.no_grad()
def warm_up(pipe: Pipeline, request: Request, on_phase: Callable[[str], None] = lambda _: None) -> list[str]:
    """One forward of each expert of `request`, the first to run last, so that it is there. Returns notes.

    on_phase: told "warm up high", "warm up low"; where blocks are compiled the word is "compile". What was compiled is
    kept for other processes. Where memory runs out it goes on as a run does.
    """
    job, notes = pipe.prepare(request), []
    for expert in reversed(job.plan.experts):
        on_phase(f"{'compile' if pipe.models.compiles else 'warm up'} {expert}")
        with pipe.report.phase(f"warm up {expert}"):
            retried(partial(_forward, pipe, job, expert), partial(pipe.relieve, expert))
    if pipe.models.keep_compiled():
        notes.append("what was compiled is kept for other processes")
    return notes


def _forward(pipe: Pipeline, job: Job, expert: Expert) -> None:
    forward_once(pipe.models.expert(expert), job, expert, pipe.models.device)

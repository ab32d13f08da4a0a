"""One forward of each expert at the size of a request, so that the first video runs as fast as later ones.

It loads kernels, compiles blocks, lets cuDNN and cuBLAS choose their algorithms for this size, and brings the weights
to where they will be. Each expert runs once: with a large shift the change of experts comes late, and the first two
steps would never reach the second one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from wan_core.config import Request
from wan_core.pipeline.first_use import forward_each_kind
from wan_core.pipeline.memory_planning import Workload
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.resolved_request import Job
from wan_core.sampling.denoise import retried
from wan_core.sampling.plan import Expert


@torch.no_grad()
def warm_up(pipe: Pipeline, request: Request, on_phase: Callable[[str], None] = lambda _: None) -> None:
    """One forward of each expert of `request`; the expert that a run starts with comes last, so that it is on the
    device then.

    on_phase: told "warm up high", "warm up low"; "compile ..." for the forward that compiles the blocks. If memory runs
    out, it goes on as a run does.
    """
    job = pipe.prepare(request)
    for expert in reversed(job.plan.experts):
        on_phase(f"{'compile' if pipe.models.compiles else 'warm up'} {expert}")
        with pipe.report.phase(f"warm up {expert}"):
            retried(partial(_forward, pipe, job, expert), partial(pipe.memory.relieve, expert))


def _forward(pipe: Pipeline, job: Job, expert: Expert) -> None:
    request, steps = job.request, [step for step in job.plan.steps if step.expert == expert]
    image = request.image is not None or request.last_image is not None
    known = pipe.models.dit_config.out_channels == 48 and request.image is not None
    workload = replace(Workload.of(job), image=image)
    forward_each_kind(pipe.models.expert(expert), workload, steps, pipe.models.device, known=known)

"""Have a run's first step behind you: one forward of each expert at the size that will be asked for.

That loads kernels, compiles blocks, calibrates the cuDNN and cuBLAS choices of this very size, and brings the weights
where they will be. One step per expert, because steps are few before the change of experts at a large shift: a warm-up
of the first two would never reach the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from wan_core.conditioning import draw_noise
from wan_core.config import Request
from wan_core.denoise import retried
from wan_core.job import Job
from wan_core.optimize import begin_run
from wan_core.pipeline import Pipeline
from wan_core.plan import Expert


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
    model, config, batch = pipe.models.expert(expert), pipe.models.dit_config, 2 if job.batched else 1
    begin_run(model)
    noise = draw_noise(0, job.latent_shape).to(pipe.models.device)
    shape = (batch, config.in_channels, *job.latent_shape[2:])
    x = noise.new_zeros(shape)
    x[:, : noise.shape[1]] = noise
    text = model.prepare_text(draw_noise(1, (1, 8, config.text_dim)).to(noise.device).expand(batch, -1, -1))
    step = next(step for step in job.plan.steps if step.expert == expert)
    known = config.out_channels == 48 and job.request.image is not None  # each latent frame has its own timestep
    timestep = torch.full((batch, shape[2]) if known else (batch,), step.timestep, device=noise.device)
    model(x, timestep, text)
    begin_run(model)

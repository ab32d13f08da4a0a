"""One forward of each expert at the size of a request, so that the first video runs as fast as later ones.

It loads kernels, compiles blocks, lets cuDNN and cuBLAS choose their algorithms for this size, and brings the weights
to where they will be. Each expert runs once: with a large shift the change of experts comes late, and the first two
steps would never reach the second one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import torch

from wan_core.config import Request
from wan_core.execution.optimize import begin_run
from wan_core.models.wan.config import IMAGE_TOKENS
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import ForwardInfo
from wan_core.pipeline.builder import finish
from wan_core.pipeline.model_parts import is_packed
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.resolved_request import Job
from wan_core.pipeline.settings import ModelSettings, PartToLoad
from wan_core.pipeline.sources import random_part
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.denoise import nag_numbers, retried
from wan_core.sampling.plan import Expert
from wan_core.sampling.sparsity.run import sparse_attention
from wan_core.sampling.stages import smaller

TOKENS = 16  # rows and columns of latents: enough for every kernel to run, few enough to take no time


@torch.no_grad()
def load_kernels(settings: ModelSettings, device: torch.device) -> None:
    """Run a block of random weights as `settings` says, so that kernels are compiled, or read from where an earlier
    process kept them, before the weights of the model are there. Nothing of it stays."""
    config, quantization = replace(settings.found.dit, num_layers=1), settings.quantization
    if quantization is not None:
        quantization = None if is_packed(quantization) else replace(quantization, keep_blocks=0)
    block = PartToLoad(random_part(config, 0), settings.dtype, quantization).load(device)
    model = cast(WanModel, finish(block, settings, device, graphs=False))
    x = draw_noise(0, (1, config.in_channels, 1, TOKENS, TOKENS)).to(device)
    image = None if config.image_dim is None else x.new_zeros(1, IMAGE_TOKENS, config.image_dim)
    text = model.prepare_text(x.new_zeros(1, 8, config.text_dim), image)
    model(x, torch.full((1,), 500.0, device=device), text)


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
            retried(partial(_forward, pipe, job, expert), partial(pipe.relieve, expert))


def _forward(pipe: Pipeline, job: Job, expert: Expert) -> None:
    forward_once(pipe.models.expert(expert), job, expert, pipe.models.device)


def forward_once(model: WanModel, job: Job, expert: Expert, device: torch.device) -> None:
    """A forward of `model` as the first step of `expert` in `job` runs it, and nothing of it left behind. Where some
    steps have sparse attention and some have not, or have other sizes, one of each: they are different code."""
    config, batch = model.config, 2 if job.batched else 1
    begin_run(model)
    B, C, T, Y, X = job.latent_shape
    grid = max(job.plan.window_sizes(T)), Y, X
    noise = draw_noise(0, (B, C, *grid)).to(device)
    shape = (batch, config.in_channels, *grid)
    x = noise.new_zeros(shape)
    x[:, : noise.shape[1]] = noise
    # Two prompts, of which one branch sees its part, as in a run.
    rows = draw_noise(1, (1, 8, config.text_dim)).to(device).expand(2 if job.plan.reads_negative else batch, -1, -1)
    prepared, nag = model.prepare_text(rows), job.plan.nag
    text = prepared.rows(0, batch)
    image = job.request.image is not None or job.request.last_image is not None
    known = config.out_channels == 48 and job.request.image is not None  # each latent frame has its own timestep
    steps = [step for step in job.plan.steps if step.expert == expert]
    kinds = {(step.scale, step.sparsity > 0, step.nag): step for step in reversed(steps)}
    for step in kinds.values():  # the first of each kind
        rows, columns = smaller((Y, X), step.scale, config.patch_size[1:])
        branches = step.branches if job.batched else step.branches[:1]
        timestep = torch.full((batch, shape[2]) if known else (batch,), step.timestep, device=device)
        seen = text
        if step.nag and nag is not None:
            seen = text.with_negative(text, nag_numbers(nag, device))
        alike = [other for other in steps if other.scale == step.scale]
        with sparse_attention(model, job.plan, alike, grid, image):
            model(x[..., :rows, :columns], timestep, seen, ForwardInfo(step.index, branches, sparsity=step.sparsity))
    begin_run(model)

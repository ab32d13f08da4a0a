"""What a task takes of a card's memory at full size, from architectures alone, before there are files."""

from __future__ import annotations

from dataclasses import replace

import torch

from wan_core.config import QUANTIZED, LoadOptions, Request
from wan_core.execution.memory.planning import Beside, Sizes, factor, unit_bytes
from wan_core.execution.memory.streaming import stage_bytes
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import family_of, plain_task
from wan_core.models.wan.tasks import Task
from wan_core.pipeline.memory_planning import Workload, beside_workload
from wan_core.pipeline.resolved_request import make_job
from wan_core.pipeline.settings import PartToLoad, compute_dtype
from wan_core.pipeline.sources import find_models


def task_memory(
    options: LoadOptions, request: Request, *, image: bool = False, fused: bool = True
) -> tuple[Sizes, Beside]:
    """Bytes of the models that `options` names, and of the activations when they make `request` on a GPU. image: a
    first frame is given. fused: the fused kernels run; plain torch takes more."""
    models = find_models(options, image=image)
    # Without files of pictures and videos: the size alone matters. What they add is counted.
    job = make_job(request, plain_task(models.task), models.dit, models.vae)
    seen = image or models.task.image == "channels"
    workload = with_media(replace(Workload.of(job), image=seen), models.task, models.dit, job.frames / job.fps)
    cuda = torch.device("cuda")
    dtype, vae_dtype = compute_dtype(options.precision, cuda), compute_dtype("auto", cuda)
    sizes = Sizes(
        units=unit_bytes(models.dit, dtype.itemsize, options.precision in QUANTIZED),
        experts=1 + ("low" in models.of),
        text_encoder=models.of["text_encoder"].bytes(dtype),
        text_stage=stage_bytes(PartToLoad(models.of["text_encoder"], dtype).units, 0),
        vae=models.of["vae"].bytes(vae_dtype),
        clip_vision=models.of["clip_vision"].bytes(dtype) if "clip_vision" in models.of else 0,
    )
    kind = "cuda" if fused else "cpu"
    per_token = factor(
        models.dit, itemsize=dtype.itemsize, device=kind, compile=options.compile, precision=options.precision
    )
    return sizes, beside_workload(models, workload, per_token, dtype.itemsize)


def with_media(workload: Workload, task: Task, dit: DiTConfig, seconds: float) -> Workload:
    """`workload` with all that the family of a task may have: pictures in front of its video, so many `seconds` of
    sound."""
    family, (B, C, T, Y, X) = family_of(task), workload.latent_shape
    if not family.driven:
        return workload
    seconds = 0.0 if family.speech_states(dit) is None else seconds
    leading = len(family.front) + family.clips.leading
    return replace(workload, latent_shape=(B, C, T + leading, Y, X), image=True, seconds=seconds)

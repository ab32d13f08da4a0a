"""The right choice by card: precision, attention and residency, each with its reason.

`card_choices` is the one function: `doctor` and `plan --memory` print it for the card that is there and for what runs
there, and `tools/readme_tables.py` writes the table of docs/choices.md with it. Names come from `wan_core.ops.cards`,
which `auto` reads too. What depends on memory is the memory plan of a Wan 2.2 A14B pair at 1280x720 and 81 frames.
`task_memory` says what that or any other task takes, from architectures alone, before there are files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from wan_core.config import QUANTIZED, LoadOptions, Request
from wan_core.execution.memory.planning import Beside, MemoryPlan, Sizes, factor, limited, plan_memory, unit_bytes
from wan_core.execution.memory.streaming import stage_bytes
from wan_core.execution.report import GIB
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import Task, family_of, plain_task
from wan_core.ops.attention.registry import BACKENDS, auto_choice
from wan_core.ops.cards import Capability, capability, card_of, name_of
from wan_core.ops.kernels import fused
from wan_core.ops.quant.int8 import why_not_kitchen
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.pipeline.check import make_job
from wan_core.pipeline.memory_planning import beside_plan
from wan_core.pipeline.settings import PartToLoad, compute_dtype
from wan_core.pipeline.sources import find_models
from wan_core.sampling.build import ModelFacts
from wan_core.sampling.plan import Plan

TASK, HEAD_DIM = "t2v-A14B", 128
Runs = Callable[[str, str], bool]
"""(kind, name) -> whether it runs: kind is "attention", "precision" or "kernels" (name "fused")."""


@dataclass(frozen=True)
class Choice:
    what: str
    value: str
    why: str


def card_choices(card: Capability, gib: float, runs: Runs) -> tuple[Choice, ...]:
    """For a card of this compute capability with so many GiB. Raises OptionError for less memory than CUDA takes."""
    precision = _precision(card, gib, runs)
    plan = _plan(precision.value, gib, runs("kernels", "fused"))
    return precision, _attention(card, runs), _residency(plan, gib)


def runs_on(device: torch.device) -> Runs:
    """What runs on `device`, as each kernel says. INT8 without comfy-kitchen runs too slowly to be chosen."""

    def runs(kind: str, name: str) -> bool:
        if kind == "attention":
            return BACKENDS[name].why_not(device, torch.bfloat16, HEAD_DIM) is None
        if kind == "kernels":
            return fused.why_not(device) is None
        return SCHEMES[name].why_not(device) is None and (name != "int8" or why_not_kitchen(device) is None)

    return runs


def choices_on(device: torch.device, gib: float | None = None) -> tuple[Choice, ...]:
    """For the card that is there, or one like it with `gib` GiB; none for a device that is no NVIDIA GPU."""
    card = capability(device)
    if card is None:
        return ()
    gib = torch.cuda.get_device_properties(device).total_memory / GIB if gib is None else gib
    return card_choices(card, gib, runs_on(device))


def choice_lines(choices: Sequence[Choice]) -> list[str]:
    """For people."""
    lines = [f"  {one.what:<22} {one.value}, because {one.why}" for one in choices]
    return ["on this card, for Wan 2.2 A14B at 1280x720 and 81 frames", *lines]


def _precision(gpu: Capability, gib: float, runs: Runs) -> Choice:
    card = card_of(gpu)
    name = next((name for name in card.precision if runs("precision", name)), None)
    if name is not None:
        units = "INT8" if name == "int8" else "FP8"
        why = f"{name_of(gpu)} has {units} units, weights take half the memory; {card.measured}"
        return Choice("precision", name, why)
    missing = f"{' and '.join(card.precision)} cannot run" if card.precision else f"{card.name} has no faster one"
    if _plan("bf16", gib, runs("kernels", "fused")).policy != "stream":
        return Choice("precision", "checkpoint", f"{missing}; bf16 fits")
    return Choice("precision", "fp8-weights", f"{missing}; weights take half the memory, products are in bf16")


def _attention(gpu: Capability, runs: Runs) -> Choice:
    card = card_of(gpu)
    choose = functools.partial(auto_choice, gpu, torch.bfloat16, HEAD_DIM, functools.partial(runs, "attention"))
    name, fast, merging = choose(), choose(rounding=True), choose(rounding=True, needs_lse=True)
    why = f"the fastest exact one that runs; {card.measured}"
    if fast != name:
        why += f". `fast` takes {fast}, which rounds"
    if fast != merging:
        why += f"; for Animate-2 {merging}, because {fast} gives no log-sum-exp"
    return Choice("attention", f"auto ({name})", why)


def _residency(plan: MemoryPlan, gib: float) -> Choice:
    takes = f"of {gib:.0f} GiB the largest phase takes {plan.peak / GIB:.1f}"
    if not plan.fits:
        return Choice("residency", "does not fit", f"{takes}: make a smaller video")
    blocks = f", {plan.resident_blocks} of {plan.blocks} blocks stay" if plan.policy == "stream" else ""
    return Choice("residency", f"{plan.policy}{blocks}", takes)


def _plan(precision: str, gib: float, kernels: bool) -> MemoryPlan:
    return plan_memory(*_needs("bf16" if precision == "checkpoint" else precision, kernels), limited(gib))


@functools.cache
def _needs(precision: str, kernels: bool) -> tuple[Sizes, Beside]:
    return task_memory(LoadOptions(model=f"random:{TASK}", precision=precision), Request(prompt=""), fused=kernels)


def task_memory(
    options: LoadOptions, request: Request, *, image: bool = False, fused: bool = True
) -> tuple[Sizes, Beside]:
    """Bytes of the models that `options` names, and of the activations when they make `request` on a GPU. image: a
    first frame is given. fused: the fused kernels run; plain torch takes more."""
    models = find_models(options, image=image)
    # Without files of pictures and videos: the size alone matters. What they add is counted.
    job = make_job(request, ModelFacts(task=plain_task(models.task), dit=models.dit, vae=models.vae))
    seen = image or models.task.image == "channels"
    plan = with_media(replace(job.plan, image=seen), models.task, models.dit, job.frames / job.fps)
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
    return sizes, beside_plan(models, plan, per_token, dtype.itemsize)


def with_media(plan: Plan, task: Task, dit: DiTConfig, seconds: float) -> Plan:
    """`plan` with all that a task's family may have: pictures in front of its video, so many `seconds` of sound."""
    family, (B, C, T, Y, X) = family_of(task), plan.latent_shape
    if not family.driven:
        return plan
    seconds = 0.0 if family.speech_states(dit) is None else seconds
    leading = len(family.front) + family.clips.leading
    return replace(plan, latent_shape=(B, C, T + leading, Y, X), image=True, seconds=seconds)

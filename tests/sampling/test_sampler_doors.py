"""The plan of ComfyUI's samplers against the plan of this engine's own loop, for the option sets of every door."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.cli.test_plan_and_generate import FULL, PARSER, begins_with, drawn_options, media
from wan_core.cli.generate import load_options_of, request_of
from wan_core.config import LoadOptions, OptionError, Request, UserError
from wan_core.models.wan.families.task import Task
from wan_core.pipeline.check import check_request
from wan_core.sampling.build import SamplerRequest, build_sampler_plan
from wan_core.sampling.native.plan import NativeModel
from wan_core.sampling.plan import Plan

__all__ = ["media"]  # a fixture
SETS = 200
TWICE = ("heun", "dpmpp_2s_ancestral")  # solvers of two forwards a step


def planned(options: LoadOptions, request: Request) -> Plan | str:
    """The plan, or what is refused."""
    try:
        return check_request(options, request, torch.device("cpu")).plan
    except UserError as fault:
        return str(fault)


def planned_for_comfyui(plan: Plan, request: Request, task: Task) -> Plan | str:
    """The plan of a sampler of ComfyUI that walks the steps of `plan`, which skips nothing."""
    assert request.skip is not None
    asked = SamplerRequest(
        sigmas=(*(step.sigma for step in plan.steps), plan.steps[-1].sigma_next),
        solver=plan.solver,
        guidance=plan.steps[0].guidance,
        branches=plan.steps[0].branches,
        skip=request.skip,
        image=request.image is not None,
    )
    try:
        return build_sampler_plan(asked, NativeModel("WanModel", task.full_size, task, None, plan.shift))[0]
    except OptionError as fault:
        return str(fault)


def decisions(plan: Plan) -> list[tuple]:
    return [(step.action, step.skipped, step.sparsity) for step in plan.steps]


def test_samplers_of_comfyui_decide_as_our_own_loop(media: dict[str, str]) -> None:
    """Both skip, and read, the same in every step, and refuse the same; all that may differ is named here."""
    equal = 0
    for number in range(SETS):
        arguments, task = drawn_options(number), FULL[number % len(FULL)]
        if "--denoise" in arguments:
            continue  # a part of a run, whose place in it a sampler estimates
        line = ["--prompt", "x", "--model", f"random:{task.name}", *begins_with(task, arguments, media), *arguments]
        try:
            options = PARSER.parse_args(["generate", *line])
            loaded, request = load_options_of(options), request_of(options)
        except UserError:  # one value alone, which is refused where it is read
            continue
        if request.skip is None:
            continue
        base = planned(loaded, replace(request, skip=None))
        if isinstance(base, str):
            continue
        ours, theirs = planned(loaded, request), planned_for_comfyui(base, request, task)
        if request.skip.magcache is not None:  # its rule counts the forwards of our own sampler
            assert isinstance(theirs, str) and "taylorseer" in theirs, arguments
            continue
        if isinstance(ours, str) and base.solver in TWICE and "two forwards" in ours:
            assert isinstance(theirs, Plan)  # a forward belongs to the step of its sigma, whichever it is
        elif isinstance(ours, str) and ours.startswith("sparse attention: distilled weights of Animate-2"):
            assert isinstance(theirs, Plan)  # the frame that they scale is ComfyUI's to scale
        elif isinstance(ours, str) or isinstance(theirs, str):
            one, other = (str(refusal).partition(" does not fit ")[2] or refusal for refusal in (ours, theirs))
            assert one == other, (task.name, arguments)
        else:
            assert decisions(ours) == decisions(theirs), (task.name, arguments)
            equal += 1
    assert equal > 20

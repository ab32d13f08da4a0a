"""Context windows that ComfyUI's nodes put on a MODEL: as the engine's options, where what it has no word for is
refused, and in the plan of ComfyUI's own sampler."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from typing import Any

from wan_core.config import FUSE_METHODS, WINDOW_SCHEDULES, OptionError, WindowOptions
from wan_core.sampling.plan import Plan

HANDLER = "context_handler"  # a model option
KIND = "IndexListContextHandler"
WRAPPERS = {"ContextWindows_prepare_sampling", "ContextWindows_sampler_sample"}  # that come with it
TIME = 2  # the axis of latents that is cut


def read_windows(model: Any, where: str) -> WindowOptions | None:
    """The context windows of a native MODEL; None: it has none. Raises OptionError naming what is not carried over.
    where: what messages call the MODEL."""
    handler = model.model_options.get(HANDLER)
    if handler is None:
        return None
    refused = list(_not_carried(handler))
    if refused:
        raise OptionError(
            f"{where} has context windows with {'; '.join(refused)}: change that in its context windows node, or use "
            "ComfyUI's own sampler for this model"
        )
    schedule = handler.context_schedule.name
    return WindowOptions(
        length=handler.context_length,
        overlap=handler.context_overlap,
        schedule=schedule,
        fuse=handler.fuse_method.name,
        closed_loop=handler.closed_loop and schedule == "looped_uniform",  # without effect on others
        freenoise=handler.freenoise,
        retain_first=bool(handler.cond_retain_index_list),
        lead=getattr(handler, "causal_window_fix", False),  # older versions have none
        split=bool(handler.split_conds_to_windows),
    )


def with_native_windows(plan: Plan, model: Any, frames: int | None) -> Plan:
    """`plan` of one sampler's steps, with the windows in which ComfyUI runs them: those of the MODEL's own handler. A
    note says where they are not known. frames: of the latents; None: not known."""
    handler = model.model_options.get(HANDLER)
    if handler is None:
        return plan
    if type(handler).__name__ != KIND or handler.dim != TIME:
        return _noted(plan, f"context windows of another kind ({type(handler).__name__}) are not counted")
    if frames is None:
        return _noted(plan, "context windows are not counted: connect a latent, for the length of the video")
    if frames <= handler.context_length:
        return _noted(plan, f"context windows: all {frames} latent frames fit into one")
    steps = []
    for number, step in enumerate(plan.steps):
        own = copy(handler)
        own._step = number
        windows = own.context_schedule.func(frames, own, model.model_options)
        steps.append(replace(step, windows=tuple(map(tuple, windows))))
    counts = sorted({step.runs for step in steps})
    runs = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    length = f"{handler.context_length} of {frames} latent frames"
    plan = replace(plan, steps=tuple(steps), unskipped=sum(step.unskipped for step in steps))
    return _noted(plan, f"context windows of {length}: {runs} in a step, each a forward of its own")


def frames_seen(plan: Plan, model: Any, frames: int) -> int:
    """The most latent frames that one forward of `plan`, which has the windows of `model`, sees."""
    lead = getattr(model.model_options.get(HANDLER), "causal_window_fix", False)
    windows = [window for step in plan.steps for window in step.windows]
    return max((len(window) + (lead and window[0] > 0) for window in windows), default=frames)


def _noted(plan: Plan, note: str) -> Plan:
    return replace(plan, notes=(*plan.notes, note))


def _not_carried(handler: Any) -> Iterator[str]:
    """In words."""
    if type(handler).__name__ != KIND:
        yield f"a handler of its own kind ({type(handler).__name__})"
        return
    if handler.context_schedule.name not in WINDOW_SCHEDULES:
        yield f"the schedule {handler.context_schedule.name}"
    if handler.fuse_method.name not in FUSE_METHODS:
        yield f"the fuse method {handler.fuse_method.name}"
    if handler.dim != TIME:
        yield f"dim {handler.dim}, which is not time (2)"
    if handler.context_stride != 1 and handler.context_schedule.name.endswith("uniform"):
        yield f"context_stride {handler.context_stride}, whose windows leave frames out or go past the end (1 does not)"
    if handler.cond_retain_index_list not in ([], [0]):
        yield f"cond_retain_index_list {handler.cond_retain_index_list} (the first frame, 0, can be retained)"
    if getattr(handler, "latent_retain_index_list", []):
        yield "latent_retain_index_list"
    if any(getattr(handler, "callbacks", {}).values()):
        yield "callbacks of another pack"

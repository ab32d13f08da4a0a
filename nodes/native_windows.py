"""Context windows that ComfyUI's nodes put on a MODEL, as the engine's options. What it has no word for is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wan_core.config import FUSE_METHODS, WINDOW_SCHEDULES, OptionError, WindowOptions

HANDLER = "context_handler"  # a model option
KIND = "IndexListContextHandler"
WRAPPERS = {"ContextWindows_prepare_sampling", "ContextWindows_sampler_sample"}  # that come with it
TIME = 2  # the axis of latents that is cut


def read_windows(model: Any, where: str) -> WindowOptions | None:
    """Of a native MODEL; None where it has none. Raises OptionError naming what is not carried over. where: what
    messages call the MODEL."""
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
    )


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
    if handler.split_conds_to_windows:
        yield "split_conds_to_windows, of several texts at once"
    if any(getattr(handler, "callbacks", {}).values()):
        yield "callbacks of another pack"

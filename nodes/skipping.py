"""What the nodes share that say which forwards of a run need not run: the `skipping` socket in and out, and joining."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comfy_api.latest import io, ui

from wan_core.config import SkipOptions
from wan_core.sampling.cache.skipping import skip_words

from .sockets import SKIPPING

CUSTOM = "custom"  # of a preset: the numbers below it count


def skipping_input() -> Any:
    return SKIPPING.Input(
        "skipping",
        optional=True,
        tooltip="Settings of another of these nodes, to be joined with this one's. Only one may decide about whole "
        "steps; the guidance schedule goes with any.",
    )


def skipping_output() -> Any:
    return SKIPPING.Output("skipping_out", display_name="skipping", tooltip="For the sampler and the plan preview.")


def joined(skipping: SkipOptions | None, **settings: Any) -> io.NodeOutput:
    found = replace(skipping or SkipOptions(), **settings)
    return io.NodeOutput(found, ui=ui.PreviewText(skip_words(found)))

"""Input, output and result shared by the nodes for step caching, guidance schedule and sparse attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comfy_api.latest import io, ui

from wan_core.config import SkipOptions
from wan_core.sampling.cache.curves import CURVE_FILES
from wan_core.sampling.cache.skipping import skip_words
from wan_core.sampling.sparsity.budgets import COVERAGE_FILES

from . import host
from .sockets import SKIPPING

CUSTOM = "custom"  # preset that uses the numbers below it


def skipping_input() -> Any:
    return SKIPPING.Input(
        "skipping",
        optional=True,
        tooltip="Settings of another node of this kind, to combine with this one's. Only one step cache can be "
        "used; guidance schedule and sparse attention combine with any.",
    )


def skipping_output() -> Any:
    return SKIPPING.Output("skipping_out", display_name="skipping", tooltip="For the sampler and the plan preview.")


def joined(skipping: SkipOptions | None, **settings: Any) -> io.NodeOutput:
    combined = replace(skipping or SkipOptions(), **settings)
    return io.NodeOutput(combined, ui=ui.PreviewText(skip_words(combined)))


def measured_files(*endings: str) -> list[tuple[str, int]]:
    """What was measured of models and lies beside them, which settings take: for `fingerprint_inputs`, so that a node
    runs again when a file changes. endings: of further files."""
    return host.stamps("diffusion_models", CURVE_FILES.suffix, COVERAGE_FILES.suffix, *endings)

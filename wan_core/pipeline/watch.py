"""Callbacks that a run calls while it goes on, in this process or in worker processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from wan_core.pipeline.model_parts import Parts
from wan_core.sampling.denoise import Progress
from wan_core.sampling.pace import BlockChecks
from wan_core.sampling.plan import Plan

OnStep = Callable[[Progress, float | None], None]
"""Called after every step: what was done, and the seconds of a forward in the newest finished step that ran any (None
before the first)."""


def nothing(*_: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Who is told, from any thread. `step` and `checks` may raise to interrupt.

    found: the models that will be loaded, and what will be made. read: so many bytes more were read. loaded: the models
    are there. planned: what will run, after every check. phase: the name of a phase that begins. latents: the finished
    ones, before they are decoded. kept: where they were written. checks: called between blocks.
    """

    found: Callable[[Parts, Plan | None], None] = nothing
    read: Callable[[int], None] = nothing
    loaded: Callable[[], None] = nothing
    planned: Callable[[Plan], None] = nothing
    phase: Callable[[str], None] = nothing
    step: OnStep | None = None
    latents: Callable[[Tensor], None] = nothing
    kept: Callable[[Path], None] = nothing
    checks: BlockChecks | None = None


SILENT = Watch()

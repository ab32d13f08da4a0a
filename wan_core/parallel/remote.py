"""What workers do for a program, as calls: a whole video, or its parts one by one as a graph of nodes asks for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from wan_core.config import LoadOptions, Request
from wan_core.parallel.launcher import Workers
from wan_core.parallel.wire import plan_from, report_from
from wan_core.plan import Plan, Step
from wan_core.report import Report


@dataclass(frozen=True)
class RemoteProgress:
    """`denoise.Progress` of a step that has run elsewhere. `picture`: what `preview` gives, its middle frame alone."""

    step: Step
    plan: Plan
    forwards: int
    picture: Tensor | None = None

    @property
    def total(self) -> int:
        return len(self.plan.steps)

    def left(self, seconds: float) -> float:
        """Seconds that the rest of the run takes, at so many for one forward."""
        return seconds * sum(step.forwards for step in self.plan.steps[self.step.index + 1 :])

    def preview(self) -> Tensor:
        """Normalised latents [1, C, 1, Y, X]."""
        assert self.picture is not None
        return self.picture


OnStep = Callable[[RemoteProgress, "float | None"], None]


@dataclass(frozen=True)
class RemoteResult:
    """`pipeline.Result` of workers."""

    frames: np.ndarray
    latents: Tensor
    fps: int
    plan: Plan
    report: Report


def generate(
    workers: Workers,
    options: LoadOptions,
    request: Request,
    *,
    on_step: OnStep | None = None,
    on_phase: Callable[[str], None] = lambda _: None,
    keep_latents: Path | None = None,
) -> RemoteResult:
    """As `Pipeline.load` and `Pipeline.generate`, on all workers. Finished latents are written to `keep_latents` by
    rank 0, whose host is this one; if the disk is full, a note of the report says so and the video comes all the same.
    """
    plan: Plan | None = None

    def event(header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        nonlocal plan
        if header["name"] == "plan":
            plan = plan_from(header["plan"])
        elif header["name"] == "phase":
            on_phase(header["phase"])
        elif header["name"] == "step" and on_step is not None:
            assert plan is not None
            on_step(RemoteProgress(plan.steps[header["step"]], plan, header["forwards"]), header["seconds"])

    asked = {
        "options": asdict(options),
        "request": asdict(request),
        "mesh": workers.options.mesh,
        "keep": None if keep_latents is None else str(keep_latents.absolute()),
    }
    found, tensors = workers.call("generate", asked, on_event=event)
    report = report_from(found["report"])
    return RemoteResult(tensors["frames"].numpy(), tensors["latents"], found["fps"], plan_from(found["plan"]), report)

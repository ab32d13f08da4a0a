"""Measure MagCache's curve of a model in full runs of a few videos: the mean over tokens of
||residual_t|| / ||residual_(t-1)||, per step and branch; it depends little on the prompt.

Legend: B batch, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import ClassVar, cast

import torch
from torch import Tensor

from wan_core.config import OptionError
from wan_core.execution.optimize import begin_run
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs, Place, Run
from wan_core.sampling.cache.curves import Curve, curve_name
from wan_core.sampling.cache.skipping import check_cacheable
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import Progress, Ready, denoise
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Branch, Expert

CALIBRATION = "a calibration"  # what the refusal of a solver calls it


class Recorder:
    """The runner that records, for every forward, the ratio of its residual to the branch's last one. Forwards must run
    one branch at a time."""

    name: ClassVar[str] = "calibration"
    place: ClassVar[Place] = Place.RESIDUALS

    def __init__(self) -> None:
        self.norms: dict[Branch, Tensor] = {}  # [B, L] of the branch's last residual
        self.ratios: dict[tuple[int, Branch], Tensor] = {}

    def __call__(self, inputs: BlockInputs, inner: Run) -> Tensor:
        before = inputs.tokens.clone()  # blocks may overwrite tokens
        after = inner(inputs)
        (branch,) = cast("tuple[Branch, ...]", inputs.info.branches)
        norm, last = torch.linalg.vector_norm((after - before).float(), dim=-1), self.norms.get(branch)  # [B, L]
        self.ratios[inputs.info.step, branch] = norm.new_ones(()) if last is None else (norm / last).mean()
        self.norms[branch] = norm
        return after


@torch.no_grad()
def record(
    plan: Plan,
    acquire: Callable[[Expert], WanModel],
    conditioning: Conditioning,
    noise: Tensor,
    on_step: Callable[[Progress], None] | None = None,
    on_block: Callable[[], None] = lambda: None,
) -> dict[tuple[int, Branch], float]:
    """Run `plan` in full and return the ratio of every step and branch; arguments as of `denoise`."""
    recorder = Recorder()
    with ExitStack() as seams:

        def watched(expert: Expert) -> WanModel:
            seams.close()  # the last expert's
            model = acquire(expert)
            begin_run(model)  # reset state of the previous video, which would change this video's ratios
            seams.enter_context(model.runners.adding(recorder))
            return model

        denoise(plan, Ready(watched), conditioning, noise, on_step=on_step, on_block=on_block)
    return {key: float(ratio) for key, ratio in recorder.ratios.items()}


def calibrate(
    plan: Plan,
    runs: Sequence[dict[tuple[int, Branch], float]],
    source: str,
    videos: Sequence[int],
    *,
    image: bool = False,
) -> Curve:
    """The mean of recorded runs of `plan` as a curve. videos: number of videos in each run, its weight in the mean.
    image: TI2V started from an image. Raises OptionError for a plan of one step."""
    if len(plan.steps) < 2:
        raise OptionError("1 step given; a ratio needs two: calibrate with the steps you will use, 20 or more")

    def mean(index: int, branch: Branch) -> float:
        key = (index, branch if (index, branch) in runs[0] else "cond")  # without guidance: cond is used for both
        return sum(run[key] * count for run, count in zip(runs, videos, strict=True)) / sum(videos)

    return Curve(
        task=curve_name(plan.name, image),
        source=source,
        high_steps=sum(step.expert == "high" for step in plan.steps),
        shift=plan.shift,
        boundary=plan.boundary,
        solver=plan.solver,
        samples=sum(videos),
        cond=tuple(mean(step.index, "cond") for step in plan.steps),
        uncond=tuple(mean(step.index, "uncond") for step in plan.steps),
    )


def measure_curve(
    plan: Plan,
    acquire: Callable[[Expert], WanModel],
    videos: Iterable[tuple[Conditioning, Tensor]],
    *,
    source: str,
    on_step: Callable[[int], None] = lambda done: None,
    on_block: Callable[[], None] = lambda: None,
) -> Curve:
    """The curve of a model over `videos`, (conditioning, noise) of each. `plan` skips nothing.

    on_step(done) is called with the number of steps of all videos so far, on_block after every block; both may raise to
    interrupt.
    """
    check_cacheable(plan.solver, CALIBRATION)
    runs, counts, done, image = [], [], 0, False

    def note(_: Progress) -> None:
        nonlocal done
        done += 1
        on_step(done)

    for conditioning, noise in videos:
        runs.append(record(plan, acquire, conditioning, noise, note, on_block))
        counts.append(len(noise))
        image = conditioning.known is not None
    return calibrate(plan, runs, source, counts, image=image)

"""A resolution schedule: steps that run at a part of the video's width and height. Pure functions, without torch.

Latents keep their size all along. A step of a smaller size shows the model what their low spatial frequencies are at
that size, and the model predicts these; `wan_core.sampling.resolution` does it. A plan says which steps those are.

Averaging r x r latents keeps the video and divides the standard deviation of its noise by r. At the smaller size they
are therefore what the model knows from a lower sigma, sigma / (r * (1 - sigma) + sigma), and it is told that one: the
same change of the signal-to-noise ratio as a schedule whose shift is divided by r (Esser et al. 2024, arXiv:2403.03206,
section 5.3.2). Experts keep their steps, and the high-noise expert is told no timestep below the boundary: it was not
trained there. With the low-noise expert in its place the embedded model is 2 to 3 dB further from the full run.

Published: Jenga (arXiv:2505.16864), Bottleneck Sampling (2503.18940), SURF (2603.21002), DVG (2605.21042). They draw
noise again where the size changes. SURF and Bottleneck Sampling run the first steps at full size, because the layout is
lost where a run begins small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from wan_core.config import OptionError, StageOptions
from wan_core.config.table import parse_words, spelled
from wan_core.sampling.plan import Plan
from wan_core.sampling.schedules import shifted
from wan_core.sampling.steps import Step

FORM = "scale/low sigma-high sigma such as 0.5/0.9-0.98, then :every3 or :own, several joined by commas"
CLOSE = 1e-6  # sigmas of other samplers pass through their own arithmetic


def smaller(size: tuple[int, int], scale: float, patch: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of latents at `scale`: the nearest multiples of the patch, at least one."""
    if scale == 1:
        return size
    rows, columns = (max(1, round(length * scale / p)) * p for length, p in zip(size, patch, strict=True))
    return min(rows, size[0]), min(columns, size[1])


def with_stages(plan: Plan, stages: Sequence[StageOptions], part: Sequence[float] | None = None) -> Plan:
    """`plan` with the size of every step, and the timesteps of those that are smaller. Raises OptionError.

    part: sigmas of a sampler that walks a part of `plan` and counts its own steps alone, with the one where it ends."""
    if not stages:
        return plan
    sigmas = [step.sigma for step in plan.steps if not step.correction] if part is None else list(part[:-1])
    window = plan.window
    # The last step that a window leaves removes the noise that is left, unless that is to stay.
    end = None if window is None or window.leftover else window.end
    if part is None or part[-1] == 0:
        check_end(sigmas[:end], stages)
    steps: list[Step] = []
    stage: StageOptions | None = None
    for step in plan.steps:
        if not step.correction:  # which has the size of the step that it corrects
            stage = stage_at(step.sigma, stages, sigmas)
        steps.append(step if stage is None else at_stage(step, stage, plan.boundary))
    sizes = [size_words(run) for run in runs(steps) if run[0].scale != 1]
    note = f"resolution schedule: {', '.join(sizes)}" if sizes else "resolution schedule: no step has a smaller size"
    return replace(plan, steps=tuple(steps), notes=(*plan.notes, note), stages=tuple(stages))


def stage_at(sigma: float, stages: Sequence[StageOptions], sigmas: Sequence[float]) -> StageOptions | None:
    """The stage of the step that is at `sigma`; None: it has the size of the video. sigmas: where steps begin."""
    stage = next((stage for stage in stages if stage.low <= sigma <= stage.high and stage.scale != 1), None)
    if stage is None or not stage.every:
        return stage
    number = sum(sigma - CLOSE <= begin <= stage.high for begin in sigmas)  # of the step within the stage, from 1
    return None if number % stage.every == 0 else stage


def check_end(sigmas: Sequence[float], stages: Sequence[StageOptions]) -> None:
    """Raise OptionError where the last step of a run has a smaller size. sigmas: where steps begin."""
    stage = stage_at(sigmas[-1], stages, sigmas)
    if stage is not None:
        raise OptionError(
            f"the last step, at sigma {sigmas[-1]:.4g}, would run at {stage.scale:g} of the size, and details come "
            "from full size: let the stage end at a higher sigma"
        )


def at_stage(step: Step, stage: StageOptions, boundary: float) -> Step:
    """`step` at a part of the width and height."""
    timestep = 1000 * shifted(step.timestep / 1000, stage.scale)
    if step.expert == "high":
        timestep = max(timestep, boundary * 1000)
    return replace(step, scale=stage.scale, own_positions=stage.positions == "own", timestep=timestep)


def runs(steps: Sequence[Step]) -> list[list[Step]]:
    """Steps of one kind (size, and with or without a driving video) that follow each other."""
    return [list(run) for _, run in groupby(steps, lambda step: step.kind)]


def size_words(run: Sequence[Step]) -> str:
    first, last = run[0].index, run[-1].index
    return f"{run[0].scale:g} of width and height in step{'' if first == last else 's'} {first}" + (
        "" if first == last else f" to {last}"
    )


def parse_stages(text: str) -> tuple[StageOptions, ...]:
    """`0.5/0.9-0.98`, `0.5/0.9-0.98:every3:own`, or several joined by commas. Raises OptionError."""
    stages: list[StageOptions] = []
    for part in text.split(","):
        numbers, *settings = part.split(":")
        scale, _, sigmas = numbers.partition("/")
        low, _, high = sigmas.partition("-")
        try:
            values = {
                "scale": float(scale),
                "low": float(low),
                "high": float(high),
                **parse_words(StageOptions, settings),
            }
        except ValueError:
            raise OptionError(f"stages {text!r} given; write {FORM}") from None
        stages.append(StageOptions(**values))
    return tuple(stages)


def stage_words(stages: Sequence[StageOptions]) -> str:
    """The stages in the form that `parse_stages` reads."""
    return ",".join(
        ":".join([f"{stage.scale:g}/{stage.low:g}-{stage.high:g}", *spelled(stage, "every", "positions")])
        for stage in stages
    )

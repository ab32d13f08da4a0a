"""TaylorSeer as a static policy: compute every n-th step, forecast the residual of the blocks in between.

A forecast of order m is the polynomial through the last m + 1 computed residuals of the same branch and expert,
continued to the step: for even steps the finite-difference form of the Taylor series. How far apart the computed steps
are is known from the plan, so the forecast is a sum with weights that are plain numbers (`wan_core.cache.residual`).

Source: Liu et al., "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", 2025,
arXiv:2503.06923, which forecasts inside each block; forecasting what all blocks add together needs a hundredth of the
memory.
"""

from __future__ import annotations

from dataclasses import replace

from wan_core.cache.magcache import marked, retained
from wan_core.config import TaylorSeerOptions
from wan_core.plan import Branch, Plan, Step


def skip_taylorseer(plan: Plan, options: TaylorSeerOptions) -> Plan:
    """`plan` with its forecast steps marked. The first step of a phase and the last of the video are computed."""
    steps: list[Step] = []
    for phase in plan.phases:
        keep = retained(len(phase), options.retention)
        held: set[Branch] = set()  # branches with a residual of this expert
        for at, step in enumerate(phase):
            between = at >= keep and (at - keep + 1) % options.interval != 0
            skip = between and step is not plan.steps[-1] and held.issuperset(step.branches)
            held |= set() if skip else set(step.branches)
            steps.append(marked(step, step.branches if skip else (), options.order))
    return replace(plan, steps=tuple(steps))

"""Policies that mark the steps of a plan: the step caches that need no measured curve.

**TaylorSeer** of order 1: compute every n-th step and forecast the residual of the blocks in between, on the line
through the last two computed residuals of the same branch and expert. For equally spaced steps this is the
finite-difference form of the Taylor series. The plan knows the distances between computed steps, so the forecast is a
weighted sum with constant weights (`wan_core.sampling.cache.residual`). A parabola through three is 2 dB further off on
the test bed. Source: Liu et al., "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", 2025,
arXiv:2503.06923, which forecasts inside each block. Forecasting the sum of all blocks needs a hundredth of the memory.
"""

from __future__ import annotations

from wan_core.config import TaylorSeerOptions
from wan_core.sampling.cache.magcache import mark, retained
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Branch


def skip_taylorseer(plan: Plan, options: TaylorSeerOptions) -> Plan:
    """`plan` with its forecast steps marked. The retained steps of an expert and the video's last step are computed."""
    skipped: list[tuple[Branch, ...]] = []
    for phase in plan.phases:
        keep = retained(len(phase), options.retention)
        computed: dict[Branch, int] = {}  # index of the last step of this expert that computed the branch
        for at, step in enumerate(phase):
            # Each branch has its own age: one that runs only in some steps might otherwise never be computed.
            recent = all(b in computed and step.index - computed[b] < options.interval for b in step.branches)
            skip = at >= keep and recent and not step.finishes
            computed |= {} if skip else dict.fromkeys(step.branches, step.index)
            skipped.append(step.branches if skip else ())
    return mark(plan, skipped, forecasts=True)

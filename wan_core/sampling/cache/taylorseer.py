"""TaylorSeer as a static policy: compute every n-th step, forecast the residual of the blocks in between.

A forecast of order m is the polynomial through the last m + 1 computed residuals of the same branch and expert,
continued to the step: for even steps the finite-difference form of the Taylor series. How far apart the computed steps
are is known from the plan, so the forecast is a sum with weights that are plain numbers
(`wan_core.sampling.cache.residual`).

Source: Liu et al., "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", 2025,
arXiv:2503.06923, which forecasts inside each block; forecasting what all blocks add together needs a hundredth of the
memory.
"""

from __future__ import annotations

from wan_core.config import TaylorSeerOptions
from wan_core.sampling.cache.magcache import mark, retained
from wan_core.sampling.plan import Branch, Plan


def skip_taylorseer(plan: Plan, options: TaylorSeerOptions) -> Plan:
    """`plan` with its forecast steps marked. The first step of a phase and the last of the video are computed."""
    skipped: list[tuple[Branch, ...]] = []
    for phase in plan.phases:
        keep = retained(len(phase), options.retention)
        computed: dict[Branch, int] = {}  # the last step of this expert that computed the branch
        for at, step in enumerate(phase):
            # By each branch's own age: one that runs in some steps only must not fall on skipped ones for ever.
            young = all(b in computed and step.index - computed[b] < options.interval for b in step.branches)
            skip = at >= keep and young and step is not plan.steps[-1]
            computed |= {} if skip else dict.fromkeys(step.branches, step.index)
            skipped.append(step.branches if skip else ())
    return mark(plan, skipped, options.order)

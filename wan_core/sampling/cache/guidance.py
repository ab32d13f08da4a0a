"""Guidance schedule: some steps run without the unconditional branch, which halves their time.

Outside an interval of sigmas there is no guidance: Kynkäänniemi et al., "Applying Guidance in a Limited Interval",
2024, arXiv:2404.07724. Inside, the slowly changing difference of the two branches is computed at every n-th guided step
of an expert and reused in between: velocity = cond + (guidance - 1) * (cond - uncond of that step).
"""

from __future__ import annotations

from dataclasses import replace

from wan_core.config import GuidanceOptions
from wan_core.sampling.plan import Plan, Step


def schedule_guidance(plan: Plan, options: GuidanceOptions) -> Plan:
    """`plan` with the unconditional branch removed from some steps. The first guided step of each expert keeps both."""
    steps: list[Step] = []
    for phase in plan.phases:
        guided = 0  # number of guided steps of this phase so far
        for step in phase:
            if "uncond" not in step.branches:
                steps.append(step)
            elif not options.low <= step.sigma <= options.high:
                steps.append(replace(step, guidance=1.0, branches=("cond",)))
            else:
                reuse = guided % options.every != 0
                steps.append(replace(step, branches=("cond",), delta=True) if reuse else step)
                guided += 1
    return replace(plan, steps=tuple(steps))

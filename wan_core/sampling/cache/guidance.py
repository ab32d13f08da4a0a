"""Steps that do without the unconditional branch, which is half of their work.

Outside of an interval of sigmas there is no guidance: Kynkäänniemi et al., "Applying Guidance in a Limited Interval",
2024, arXiv:2404.07724. Inside, the difference of the two branches, which changes slowly, is computed every n-th step
of a phase and reused in between: velocity = cond + (guidance - 1) * (cond - uncond of that step).
"""

from __future__ import annotations

from dataclasses import replace

from wan_core.config import GuidanceOptions
from wan_core.sampling.plan import Plan, Step


def schedule_guidance(plan: Plan, options: GuidanceOptions) -> Plan:
    """`plan` with branches left out. The first guided step of each phase computes both."""
    steps: list[Step] = []
    for phase in plan.phases:
        guided = 0  # steps of this phase so far that are guided
        for step in phase:
            if "uncond" not in step.branches:
                steps.append(step)
            elif not options.low <= step.sigma <= options.high:
                steps.append(replace(step, guidance=1.0, branches=("cond",)))
            else:
                last = guided % options.every != 0
                steps.append(replace(step, branches=("cond",), delta=True) if last else step)
                guided += 1
    return replace(plan, steps=tuple(steps))

"""The adaptive cache: which steps it may skip. It reads tensors during the run, so the plan cannot know more;
`wan_core.sampling.cache.adaptive_run` decides in the run.

The relative change of the velocity between two computed steps a and b, per unit of sigma, is measured on the device:
rate = ||v_a - v_b|| / (||v_b|| * |sigma_a - sigma_b|). A step at sigma may reuse the last residual while the estimated
change since the last computed step a, rate * |sigma_a - sigma|, stays below `threshold`.

After Zhou et al., "Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive Caching"
(EasyCache), 2025, arXiv:2507.02860, whose rule reads a norm back to the host at every step.
"""

from __future__ import annotations

from dataclasses import replace

from wan_core.config import AdaptiveOptions
from wan_core.sampling.cache.magcache import retained
from wan_core.sampling.plan import Branch, Plan, Step


def mark_adaptive(plan: Plan, options: AdaptiveOptions) -> Plan:
    """`plan` with the steps marked that may be skipped: never the retained steps of an expert or the video's last."""
    steps: list[Step] = []
    for phase in plan.phases:
        keep = retained(len(phase), options.retention)
        cached: set[Branch] = set()  # branches with a residual of this expert
        for at, step in enumerate(phase):
            may_skip = at >= keep and not step.finishes and cached.issuperset(step.branches)
            cached |= set(step.branches)
            steps.append(replace(step, action="adaptive", skipped=step.branches) if may_skip else step)
    return replace(plan, steps=tuple(steps), adaptive=options)

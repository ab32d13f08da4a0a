"""An adaptive policy: it looks at tensors while a video is made, so its steps cannot be known before.

The change of the velocity from one computed step to the next, relative and per unit of sigma, is measured on the
device: rate = ||v_a - v_b|| / (||v_b|| * |sigma_a - sigma_b|). A step at sigma may reuse the last residual while the
change since the computed step a, rate * |sigma_a - sigma|, stays below `threshold`.

This module marks the steps that may be skipped; `wan_core.sampling.cache.adaptive_run` decides.

In the manner of Zhou et al., "Less is Enough: Training-Free Video Diffusion Acceleration via Runtime-Adaptive
Caching" (EasyCache), 2025, arXiv:2507.02860, whose rule reads a norm back at every step.
"""

from __future__ import annotations

from dataclasses import replace

from wan_core.config import AdaptiveOptions
from wan_core.sampling.cache.magcache import retained
from wan_core.sampling.plan import Branch, Plan, Step


def mark_adaptive(plan: Plan, options: AdaptiveOptions) -> Plan:
    """`plan` with the steps marked that may be skipped: none of the first of a phase, nor the last of the video."""
    steps: list[Step] = []
    for phase in plan.phases:
        keep = retained(len(phase), options.retention)
        held: set[Branch] = set()  # branches with a residual of this expert
        for at, step in enumerate(phase):
            free = at >= keep and step is not plan.steps[-1] and held.issuperset(step.branches)
            held |= set(step.branches)
            steps.append(replace(step, action="adaptive", skipped=step.branches) if free else step)
    return replace(plan, steps=tuple(steps), adaptive=options)

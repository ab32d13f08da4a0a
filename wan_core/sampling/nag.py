"""Normalized attention guidance in a plan: the steps without classifier-free guidance also see the negative prompt.

`wan_core.models.wan.layers.nag` is what cross-attention does in them. Steps with guidance use the negative prompt
already, in a forward of its own, and stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

from wan_core.config import NagOptions, OptionError
from wan_core.sampling.plan import Plan


def with_nag(plan: Plan, options: NagOptions) -> Plan:
    """`plan` with normalized attention guidance in every step of one branch. Raises OptionError where there is none."""
    steps = tuple(replace(step, nag=step.branches == ("cond",) and not step.delta) for step in plan.steps)
    if not any(step.nag for step in steps):
        raise OptionError(
            "every step has guidance, which uses the negative prompt already: set guidance to 1 (as with distilled "
            "weights), or leave out normalized attention guidance (NAG)"
        )
    count = f"{sum(step.nag for step in steps)} of {len(steps)} steps"
    note = f"normalized attention guidance: {nag_words(options)}, in {count}"
    return replace(plan, steps=steps, nag=options, notes=(*plan.notes, note))


def nag_words(options: NagOptions) -> str:
    """`11/2.5/0.25`: scale, tau, alpha, as the command line reads them."""
    return f"{options.scale:g}/{options.tau:g}/{options.alpha:g}"

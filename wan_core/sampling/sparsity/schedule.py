"""Sparsity of attention for every step of a plan: pure functions of numbers, without torch.

The first steps fix the layout of the video and attend widely, so they read more blocks: twice as many as later steps,
and at most half (ramp). Later ones read the share that was asked for.

On the embedded model a run that reads half of the keys in its first 30 % and a quarter after is 4 dB nearer to the
dense run than one that reads all keys in its first 10 % and a quarter after, at the same total number of keys. Steps
that read all keys before such a ramp do not improve it.
"""

from __future__ import annotations

import math
from dataclasses import replace

from wan_core.config import SparseOptions
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import family_of
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Step

HALF = 0.5  # least sparsity of a ramp
# Time of attention over a share of the blocks, relative to dense FP8 attention: KERNEL * share + CHOICE. The
# block-sparse kernel is slower per block; selecting blocks and the means of unselected ones cost the constant. Measured
# on an H200 at 75,600 tokens (benchmarks/results/archive/sparse-cost-h200-*.json): a forward is at most 1 % off for
# shares from 12.5 to 50 %; at 32,760 tokens 4 %.
KERNEL, CHOICE = 1.16, 0.006
# The same for the slope of unselected blocks, 0.43 s of a forward at 720p, and for the choice by error: from
# benchmarks/results/archive/sparse-slope-h200-*.json and sparse-rest-h200-*.json.
SLOPE, ERROR = 0.08, 0.0105


def sparsify(plan: Plan, options: SparseOptions | None) -> Plan:
    """`plan` with a sparsity for every step."""
    if options is None or options.sparsity == 0:
        return plan
    sparsities = step_sparsities(options, len(plan.steps))
    steps = tuple(replace(step, sparsity=sparsities[step.index]) for step in plan.steps)
    notes = (*plan.notes, f"sparse attention: {options.words()}")
    return replace(plan, steps=steps, sparse=options, notes=notes)


def step_sparsities(options: SparseOptions, steps: int) -> tuple[float, ...]:
    """The sparsity of every one of `steps` steps."""
    ramp = math.ceil(options.ramp * steps - 1e-9)
    early = max(min(HALF, options.sparsity), 2 * options.sparsity - 1)
    return tuple(early if i < ramp else options.sparsity for i in range(steps))


def with_costs(plan: Plan, config: DiTConfig, latents: tuple[int, int, int]) -> Plan:
    """`plan` with the relative cost of its steps, for the time estimate: of sparse ones, of those in which nothing is
    controlled, where blocks for the control do not run, and of those without or over a driving video.

    latents: frames, rows and columns of one video.
    """
    attention, slope = attention_share(config, config.tokens(*latents)), plan.sparse is None or plan.sparse.slope
    uncontrolled = family_of(config).uncontrolled_cost(config)

    over, free = family_of(config).driving_costs(config, latents)

    def cost(step: Step) -> float:
        relative = step_cost(step.sparsity, attention, slope)
        relative *= 1.0 if step.control is None or any(step.control) else uncontrolled
        relative *= free if step.undriven else 1.0
        if step.passes:
            relative = (relative * (step.forwards - step.passes) + over * step.passes) / step.forwards
        return round(relative, 4)

    return replace(plan, steps=tuple(replace(step, cost=cost(step)) for step in plan.steps))


def attention_share(config: DiTConfig, tokens: int) -> float:
    """Share of self-attention in the FLOPs of a forward: 0.72 for A14B at 75,600 tokens. It is roughly the share of the
    time as well, because low precisions speed up linears and attention alike."""
    # Of linears: self-attention's q, k, v and o, cross-attention's q and o, and the two matrices of the FFN.
    attention, linears = 4 * tokens**2 * config.dim, 2 * tokens * config.dim * (6 * config.dim + 2 * config.ffn_dim)
    return attention / (attention + linears)


def beyond_means(slope: bool) -> float:
    """Time for the choice by error, and for slopes, relative to dense attention."""
    return ERROR + (SLOPE if slope else 0.0)


def step_cost(sparsity: float, share: float, slope: bool = True) -> float:
    """Time of a sparse forward relative to a dense one. share: of a dense forward's time, in attention. Above 1 where a
    step reads nearly all blocks: a sparse step runs its own kernel, also where the dense one is faster (reading all of
    them takes 1.17 of its time)."""
    if sparsity == 0:
        return 1.0
    return round(1 - share + share * (KERNEL * (1 - sparsity) + CHOICE + beyond_means(slope)), 4)

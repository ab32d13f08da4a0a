"""Sparse attention in a plan: pure functions of numbers.

The first steps decide where things are, from noise, and attend widely: they read everything, then twice as much as
later and half at most, and from the end of the ramp on what was asked for. On the embedded model a run that reads half
of the keys in its first 30 % and a quarter after is 4 dB nearer to the dense one than one that reads everything in its
first 10 % and a quarter after, at the same number of keys; steps that read everything before such a ramp bring it no
nearer. Knows no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from wan_core.config import SPARSE_KERNELS, SPARSE_SCORES, OptionError, SparseOptions
from wan_core.models.wan.config import DiTConfig
from wan_core.sampling.plan import Expert, Plan

PRESETS: dict[str, SparseOptions] = {
    "quality": SparseOptions(sparsity=0.5, dense_steps=0.1),
    "balanced": SparseOptions(sparsity=0.8125, dense_steps=0.0),
    "fast": SparseOptions(sparsity=0.875, dense_steps=0.0),
}
HALF = 0.5  # of the blocks are left out in a ramp at least
# Measured on an H200 at 75,600 tokens (benchmarks/results/sparse-*.json): attention over a share of the blocks takes
# this share of dense FP8 attention's time and more, because the block-sparse kernel is slower on what it reads, blocks
# must be chosen, and means stand in for the rest. Between 12.5 and 50 % it is off by 1 % of a forward at most.
KERNEL, CHOICE = 1.075, 0.06
FORM = "quality, balanced, fast, or sparsity/dense steps/dense layers such as 0.8125/0/0, then options after a colon: "
WORDS = "ramp0.3, mass0.9, floor0.05, reuse2, even, alone, mean, or a kernel"


def sparsify(
    plan: Plan, options: SparseOptions | None, keeps: Mapping[Expert, tuple[float, ...]] | None = None
) -> Plan:
    """`plan` with a sparsity for every step. keeps: for each expert that was calibrated the share of the blocks that
    each of its layers reads, in place of the same share for all."""
    if options is None or options.sparsity == 0:
        return plan
    dense, ramp = (math.ceil(share * len(plan.steps) - 1e-9) for share in (options.dense_steps, options.ramp))

    early = max(min(HALF, options.sparsity), 2 * options.sparsity - 1)

    def sparsity(index: int) -> float:
        return 0.0 if index < dense else early if index < ramp else options.sparsity

    steps = tuple(replace(step, sparsity=sparsity(step.index)) for step in plan.steps)
    found = tuple((expert, keeps[expert]) for expert in plan.experts if keeps and expert in keeps)
    note = f"sparse attention: {sparse_words(options)}, from step {dense} on" if dense < len(steps) else ""
    if found:
        note += "; shared out between layers as calibrated for " + " and ".join(expert for expert, _ in found)
    return replace(plan, steps=steps, sparse=options, keeps=found, notes=(*plan.notes, note) if note else plan.notes)


def with_costs(plan: Plan, config: DiTConfig, tokens: int) -> Plan:
    """`plan` with what its sparse steps cost, for its estimate. tokens: of one video. Raises OptionError for budgets of
    another number of layers."""
    if plan.sparse is None:
        return plan
    for expert, keeps in plan.keeps:
        if len(keeps) != config.num_layers:
            raise OptionError(
                f"the coverage of the {expert}-noise expert has {len(keeps)} layers, and the model has "
                f"{config.num_layers}: calibrate it again, or leave it out with the word even"
            )
    sparse_layers = max(0, config.num_layers - plan.sparse.dense_layers) / config.num_layers
    share = attention_share(config, tokens) * sparse_layers
    return replace(plan, steps=tuple(replace(s, cost=step_cost(s.sparsity, share)) for s in plan.steps))


def attention_share(config: DiTConfig, tokens: int) -> float:
    """The share of self-attention in the work of a forward: 0.72 for A14B at 75,600 tokens. Precisions speed up
    products and attention alike, so it is the share of the time as well, roughly."""
    attention = 4 * tokens**2 * config.dim
    linears = 2 * tokens * config.dim * (6 * config.dim + 2 * config.ffn_dim)  # q, k, v, o, and q, o of the cross
    return attention / (attention + linears)


def step_cost(sparsity: float, share: float) -> float:
    """Of a forward that reads everything, whose sparse layers' attention takes `share`."""
    if sparsity == 0:
        return 1.0
    return round(1 - share + share * min(1.0, KERNEL * (1 - sparsity) + CHOICE), 4)


def parse_sparse(text: str) -> SparseOptions:
    """A preset or numbers, and words after colons: `balanced`, `0.8125/0/0:reuse2:cudnn`. Raises OptionError."""
    first, *words = text.split(":")
    if first in PRESETS:
        found = PRESETS[first]
    else:
        given = first.split("/")
        try:
            if not 1 <= len(given) <= 3:
                raise ValueError(first)
            sparsity, dense, layers = [*given, *("", "0.05", "0")[len(given) :]]
            found = SparseOptions(sparsity=float(sparsity), dense_steps=float(dense), dense_layers=int(layers))
        except ValueError as fault:
            raise fault if isinstance(fault, OptionError) else _unknown(text) from fault
    for word in words:
        found = _with(found, word, text)
    return found


def _with(options: SparseOptions, word: str, text: str) -> SparseOptions:
    try:
        for name in ("mass", "floor", "ramp"):
            if word.startswith(name):
                return replace(options, **{name: float(word.removeprefix(name))})
        if word.startswith("reuse"):
            return replace(options, reuse=int(word.removeprefix("reuse")))
    except ValueError as fault:
        raise fault if isinstance(fault, OptionError) else _unknown(text) from fault
    if word in SPARSE_SCORES:
        return replace(options, score=word)
    if word in SPARSE_KERNELS:
        return replace(options, kernel=word)
    if word == "even":
        return replace(options, budgets=False)
    if word == "alone":
        return replace(options, pooled=False)
    raise _unknown(text)


def _unknown(text: str) -> OptionError:
    return OptionError(f"sparse {text!r} given; write {FORM}{WORDS} ({', '.join(SPARSE_KERNELS)})")


def sparse_words(options: SparseOptions) -> str:
    """As it is typed: `0.75/0.1/0:reuse2`."""
    words = [f"{options.sparsity:g}/{options.dense_steps:g}/{options.dense_layers}"]
    words += [f"ramp{options.ramp:g}"] * (options.ramp != SparseOptions(sparsity=0).ramp)
    if options.mass is not None:
        words += [f"mass{options.mass:g}", f"floor{options.floor:g}"]
    words += [f"reuse{options.reuse}"] * (options.reuse > 1) + [options.score] * (options.score != "spread")
    words += ["even"] * (not options.budgets) + ["alone"] * (not options.pooled)
    words += [options.kernel] * (options.kernel != "auto")
    return ":".join(words)

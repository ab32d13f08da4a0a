"""What the blocks add to the tokens, kept from computed steps and used at skipped ones.

`Program` says for one branch of one phase which step's residual goes into which slot, and what a skipped step sums up:
it follows from the plan, so a residual that nothing will use is never stored. `ResidualCache` carries it out, as a
runner around the blocks.

Legend: B batch, L tokens, C channels, S slots, N branches of a batched forward (1 or 2, along the batch).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor

from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs, Place, Run
from wan_core.sampling.plan import Branch, Plan, Step

BOTH: tuple[Branch, ...] = ("cond", "uncond")
Sum = tuple[tuple[int, float], ...]
"""(slot, weight) of the residuals that replace the blocks."""


@dataclass(frozen=True)
class Program:
    """By the index of a step in its plan: the slot its residual is stored in, or what it uses instead of the blocks."""

    slots: int
    store: Mapping[int, int]
    use: Mapping[int, Sum]


def residual_program(phase: Sequence[Step], branch: Branch) -> Program:
    """Of one branch in the steps of one expert. Steps whose action is "adaptive" both store and may use slot 0."""
    if any(step.action == "adaptive" for step in phase):
        runs = [step for step in phase if branch in step.branches]
        may = {step.index: ((0, 1.0),) for step in runs if step.action == "adaptive"}
        return Program(1, dict.fromkeys([step.index for step in runs], 0) if may else {}, may)
    computed: list[Step] = []
    sources: dict[int, tuple[list[Step], list[float]]] = {}
    for step in phase:
        if branch in step.skipped:
            past = computed[-(step.order + 1) :]
            assert past, f"step {step.index} skips its {branch} branch before anything was computed"
            sources[step.index] = past, weights([s.index for s in past], step.index)
        elif branch in step.branches:
            computed.append(step)
    slots = max((len(past) for past, _ in sources.values()), default=0)
    used = {step.index for past, _ in sources.values() for step in past}
    store = {index: n % slots for n, index in enumerate(sorted(used))}
    use = {at: tuple((store[s.index], w) for s, w in zip(past, ws, strict=True)) for at, (past, ws) in sources.items()}
    return Program(slots, store, use)


def weights(past: Sequence[float], now: float) -> list[float]:
    """Lagrange's: the value at `now` of the polynomial through values at `past` is the sum of weight * value. One
    value: 1, it is used as it is."""
    found = []
    for i, here in enumerate(past):
        weight = 1.0
        for j, other in enumerate(past):
            if j != i:
                weight *= (now - other) / (here - other)
        found.append(weight)
    return found


def residual_bytes(plan: Plan, tokens: int, dim: int, itemsize: int = 2) -> int:
    """What the residuals of the larger phase take: `tokens` of all videos of one branch, in the model's dtype."""
    slots = [sum(residual_program(phase, branch).slots for branch in BOTH) for phase in plan.phases]
    return max(slots) * tokens * dim * itemsize


class ResidualCache:
    """The runner of one phase that keeps what the blocks add, or adds it in their place.

    Every branch has a state of its own. Buffers are allocated once, in the dtype and shape of the tokens that arrive:
    below a runner that shards them, a shard.
    """

    name: ClassVar[str] = "residual cache"
    place: ClassVar[Place] = Place.RESIDUALS

    def __init__(self, programs: Mapping[Branch, Program]) -> None:
        self.programs = programs
        self.buffers: dict[Branch, Tensor] = {}  # [S, B, L, C]

    def __call__(self, inputs: BlockInputs, inner: Run) -> Tensor:
        """Tokens [N * B, L, C] after all blocks."""
        step, branches, tokens = inputs.info.step, cast("tuple[Branch, ...]", inputs.info.branches), inputs.tokens
        parts = list(zip(branches, tokens.chunk(len(branches)), strict=True))
        if inputs.info.skip:
            sums = [self._reused(branch, step, part) for branch, part in parts]
            return sums[0] if len(sums) == 1 else torch.cat(sums)
        # The tokens are kept before the blocks run, in the buffer itself: blocks may work in place.
        slots = {branch: self._slot(branch, step, part) for branch, part in parts}
        for branch, part in parts:
            if (kept := slots[branch]) is not None:
                kept.copy_(part)
        result = inner(inputs)
        for (branch, _), after in zip(parts, result.chunk(len(parts)), strict=True):
            if (kept := slots[branch]) is not None:
                torch.sub(after, kept, out=kept)
        return result

    def _slot(self, branch: Branch, step: int, part: Tensor) -> Tensor | None:
        """The buffer [B, L, C] of this step, None if nothing will use its residual."""
        program = self.programs[branch]
        if step not in program.store:
            return None
        if branch not in self.buffers:
            self.buffers[branch] = part.new_empty(program.slots, *part.shape)
        return self.buffers[branch][program.store[step]]

    def _reused(self, branch: Branch, step: int, part: Tensor) -> Tensor:
        """The tokens `part` of a skipped step plus the kept residuals."""
        terms = self.programs[branch].use[step]
        buffers = self.buffers[branch]
        if len(terms) == 1:
            return part + buffers[terms[0][0]]  # its weight is 1
        total = part.float()  # weights of a forecast are several and of both signs: bf16 would round each term
        for slot, weight in terms:
            total.add_(buffers[slot], alpha=weight)
        return total.to(part.dtype)


@contextmanager
def residuals(model: WanModel, phase: Sequence[Step]) -> Iterator[ResidualCache | None]:
    """A cache in the chain of `model` while `phase` runs; None where no step of it skips."""
    if not any(step.skipped for step in phase):
        yield None
        return
    cache = ResidualCache({branch: residual_program(phase, branch) for branch in BOTH})
    with model.runners.adding(cache):
        yield cache

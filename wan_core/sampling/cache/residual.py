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
from math import ceil
from typing import ClassVar, cast

import torch
from torch import Tensor

from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs, Place, Run
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Branch, Step, split_by_kind

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
    """The residual cache program of one branch for the steps of one expert."""
    computed: list[Step] = []
    sources: dict[int, tuple[list[Step], list[float]]] = {}
    for step in phase:
        if branch in step.skipped:
            past = computed[-2:] if step.action == "forecast" else computed[-1:]
            assert past, f"step {step.index} skips its {branch} branch before anything was computed"
            sources[step.index] = past, weights([one.index for one in past], step.index)
        elif branch in step.branches:
            computed.append(step)
    slots = max((len(past) for past, _ in sources.values()), default=0)
    used = {step.index for past, _ in sources.values() for step in past}
    store = {index: n % slots for n, index in enumerate(sorted(used))}
    use = {at: tuple((store[s.index], w) for s, w in zip(past, ws, strict=True)) for at, (past, ws) in sources.items()}
    return Program(slots, store, use)


def weights(past: Sequence[int], now: int) -> list[float]:
    """Weights of the values at one or two steps `past`, whose sum is the value at `now`: on the line through both, or
    the one as it is."""
    if len(past) == 1:
        return [1.0]
    first, second = past
    return [(now - second) / (first - second), (now - first) / (second - first)]


def residual_bytes(plan: Plan, tokens: int, dim: int, itemsize: int = 2) -> int:
    """What residuals take at most: `tokens` of all videos of one branch, in the model's dtype. They
    are kept while steps have one expert and one size."""
    slots: list[float] = []
    for run in (run for phase in plan.phases for run in split_by_kind(phase)):
        programs = [residual_program(run, branch) for branch in BOTH]
        slots.append(sum(program.slots for program in programs if program.store))
    return ceil(max(slots) * tokens * dim * itemsize)


class Residuals:
    """What one branch keeps of its computed steps, as its program says.

    The buffer [S, B, L, C] is allocated once, in the dtype and shape of what arrives first. A slot counts as filled
    only after `filled`, and a step can be skipped only where its slots hold what the program expects: after a step that
    was broken off, or for a branch that begins in the middle of a run, they do not.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.buffer: Tensor | None = None
        self.steps: dict[int, int] = {}  # by slot: the step whose residual it holds
        self.next = 0  # the slot that a forward fills

    @property
    def bytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.numel() * self.buffer.element_size()

    def can_skip(self, step: int) -> bool:
        """Whether everything that a skipped `step` uses is there."""
        store, terms = self.program.store, self.program.use.get(step, ())
        newest = {slot: max((s for s in store if s < step and store[s] == slot), default=-1) for slot, _ in terms}
        return bool(terms) and all(self.steps.get(slot) == source for slot, source in newest.items())

    def slot(self, step: int, like: Tensor) -> Tensor | None:
        """Where the residual of this step goes, shaped as `like`; None if nothing will use it."""
        if step not in self.program.store:
            return None
        if self.buffer is None:
            self.buffer = like.new_empty(self.program.slots, *like.shape)
        self.next = self.program.store[step]
        self.steps.pop(self.next, None)
        return self.buffer[self.next]

    def filled(self, step: int) -> None:
        """The residual of this step is in its slot."""
        self.steps[self.next] = step

    def reused(self, step: int, base: Tensor | None = None) -> Tensor:
        """What a skipped step uses: the sum of its residuals, on top of `base` where one is given."""
        assert self.buffer is not None, f"step {step} is skipped before anything was computed"
        terms = self.program.use[step]
        if len(terms) == 1:  # its weight is 1
            residual = self.buffer[terms[0][0]]
            return residual.clone() if base is None else base + residual
        (first, scale), (second, weight) = terms  # of both signs: bf16 would round each term
        total = (
            self.buffer[first].float() * scale if base is None else base.float().add(self.buffer[first], alpha=scale)
        )
        return total.add_(self.buffer[second], alpha=weight).to(self.buffer.dtype)


class KeptForward:
    """A forward of `step` that keeps residuals or uses them: of several branches, one after the other along the batch,
    each with what it keeps. The engine's blocks (`ResidualCache`) and those of ComfyUI's models call it."""

    def __init__(self, states: Sequence[Residuals], step: int) -> None:
        self.states, self.step = states, step
        self.slots: list[Tensor | None] = []  # with the tokens before the blocks

    def rows(self, tokens: Tensor) -> list[tuple[Residuals, Tensor]]:
        """Each branch's of tokens or velocities [N * B, ...]."""
        return list(zip(self.states, tokens.chunk(len(self.states)), strict=True))

    def reused(self, tokens: Tensor | None = None) -> Tensor:
        """What a skipped step uses: the residuals, on top of the tokens before the blocks where these are given."""
        if tokens is None:
            rows = [state.reused(self.step) for state in self.states]
        else:
            rows = [state.reused(self.step, part) for state, part in self.rows(tokens)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def before(self, tokens: Tensor) -> None:
        """Keep the tokens before the blocks run, in the slots themselves: blocks may work in place."""
        self.slots = []
        for state, part in self.rows(tokens):
            slot = state.slot(self.step, part)
            self.slots.append(None if slot is None else slot.copy_(part))

    def after(self, tokens: Tensor) -> None:
        """Make residuals of what is in the slots. tokens: after the blocks."""
        for slot, (state, part) in zip(self.slots, self.rows(tokens), strict=True):
            if slot is not None:
                torch.sub(part, slot, out=slot)
                state.filled(self.step)

    def output(self, velocities: Tensor) -> None:
        """Keep what the whole model returns, in place of residuals."""
        for state, part in self.rows(velocities):
            if (slot := state.slot(self.step, part)) is not None:
                slot.copy_(part)
                state.filled(self.step)


class ResidualCache:
    """The runner of one phase that keeps what the blocks add, or adds it in their place.

    Every branch has a state of its own, below a runner that shards the tokens that of a shard.
    """

    name: ClassVar[str] = "residual cache"
    place: ClassVar[Place] = Place.RESIDUALS

    def __init__(self, phase: Sequence[Step]) -> None:
        self.kept = {branch: Residuals(residual_program(phase, branch)) for branch in BOTH}

    def __call__(self, inputs: BlockInputs, inner: Run) -> Tensor:
        """Tokens [N * B, L, C] after all blocks."""
        branches = cast("tuple[Branch, ...]", inputs.info.branches)
        forward = KeptForward([self.kept[branch] for branch in branches], inputs.info.step)
        if inputs.info.skip:
            return forward.reused(inputs.tokens)
        forward.before(inputs.tokens)
        result = inner(inputs)
        forward.after(result)
        return result


@contextmanager
def residuals(model: WanModel, phase: Sequence[Step]) -> Iterator[ResidualCache | None]:
    """A cache in the chain of `model` while `phase` runs; None where no step of it skips."""
    if not any(step.skipped for step in phase):
        yield None
        return
    cache = ResidualCache(phase)
    with model.runners.adding(cache):
        yield cache

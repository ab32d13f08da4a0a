"""The chain of runners around the loop over the blocks: how sharding and step caching reach a model.

A runner is handed the inputs of the blocks and the rest of the chain, and returns the tokens after all blocks:

    print(model.runners)   # sparse tiles > sharded tokens > residual cache > blocks

Runners stand in the order of `Place`, outermost first, in whatever order they were added. Below them is the plain loop,
which tells `weights` (`wan_core.models.block_weights`) which block comes next: weights that stream are copied to the
device in time.

Legend: B batch, L tokens, C channels, D head dim, F modulation rows per sample.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Protocol, TypeVar

from torch import Tensor

from wan_core.models.block_weights import RESIDENT, BlockWeights
from wan_core.models.wan.prepared_text import PreparedText, TokenBias
from wan_core.ops.attention.protocol import SparseState

Found = TypeVar("Found")


class Place(IntEnum):
    """Where a runner stands, outermost first."""

    SCALES = 0  # measures a whole forward: scales of delayed FP8
    TILES = 1  # orders the tokens: everything below sees them in the order of the tiles
    SHARDS = 2  # hands this rank's tokens on: what is kept below is kept of a shard
    RESIDUALS = 3  # keeps or replaces what the blocks add


@dataclass(frozen=True)
class ForwardInfo:
    """Which forward of a run this is. The denoising loop says it, and runners read it.

    step: index in the plan. branches: guidance branches along the batch. skip: the blocks need not run, a residual
    cache replaces them. sparsity: share of the blocks of keys that attention does not read.
    after_block: called when the work of a block has been launched; may raise to interrupt.
    control: factors of how much each control video counts, or one for all; None: all count as prepared.
    last: another expert's forwards come next.
    """

    step: int = 0
    branches: tuple[str, ...] = ("cond",)
    skip: bool = False
    sparsity: float = 0.0
    after_block: Callable[[], None] | None = None
    control: tuple[float, ...] | None = None
    last: bool = False


SINGLE_FORWARD = ForwardInfo()


@dataclass(frozen=True)
class BlockInputs:
    """What the blocks get.

    tokens: [B, L, C], which may be overwritten: a runner that needs them later copies them.
    modulation: float32 [B, F, 6, C]. rope: [L, 1, D/2, 2].
    text: keys and values of cross-attention. info: which forward this is. grid: token frames, rows, columns.
    sparse: what sparse attention reads, set by the runner that orders the tokens.
    lengths: tokens of every shard, set by the runner that shards them.
    order: int64 [L], which token of the video each is, set by runners that order or shard them; None: all, in order.
    bias: of cross-attention, for these tokens, set by the loop.
    """

    tokens: Tensor
    modulation: Tensor
    rope: Tensor
    text: PreparedText
    info: ForwardInfo
    grid: tuple[int, int, int]
    sparse: SparseState | None = None
    lengths: Sequence[int] = ()
    order: Tensor | None = None
    bias: TokenBias | None = None


Run = Callable[[BlockInputs], Tensor]
"""Inputs of the blocks -> tokens [B, L, C] after all of them."""


class Runner(Protocol):
    name: ClassVar[str]
    place: ClassVar[Place]

    def __call__(self, inputs: BlockInputs, inner: Run) -> Tensor:
        """inner: the rest of the chain."""
        ...


class RunnerChain:
    """The runners of one model, and where its weights are."""

    def __init__(self) -> None:
        self.runners: list[Runner] = []
        self.weights: BlockWeights = RESIDENT

    def __call__(self, inputs: BlockInputs, loop: Run, places: Collection[Place] = frozenset(Place)) -> Tensor:
        """Run those that stand in `places`, `loop` innermost."""
        return self._from([runner for runner in self.runners if runner.place in places], loop)(inputs)

    def _from(self, runners: Sequence[Runner], loop: Run) -> Run:
        if not runners:
            return loop
        runner, inner = runners[0], self._from(runners[1:], loop)
        return lambda inputs: runner(inputs, inner)

    def add(self, runner: Runner) -> None:
        """Put `runner` in its place; one that stands there already goes."""
        self.runners = sorted([r for r in self.runners if r.place != runner.place] + [runner], key=lambda r: r.place)

    def remove(self, kind: type[object]) -> None:
        """Take away the runner of class `kind`, if there is one."""
        self.runners = [runner for runner in self.runners if not isinstance(runner, kind)]

    def find(self, kind: type[Found]) -> Found | None:
        return next((runner for runner in self.runners if isinstance(runner, kind)), None)

    @contextmanager
    def adding(self, runner: Runner) -> Iterator[None]:
        """Have `runner` in the chain inside; it is gone after, whatever happens. Its place must be free."""
        assert all(other.place != runner.place for other in self.runners), f"{runner.name}: its place is taken"
        self.add(runner)
        try:
            yield
        finally:
            self.runners = [other for other in self.runners if other is not runner]

    def __str__(self) -> str:
        return " > ".join([*(runner.name for runner in self.runners), f"blocks ({self.weights.name} weights)"])

"""What bounded sparse attention measures while a video is made, and the shares that follow.

The host never waits for work that is not long done. The sums of each layer travel to pinned memory with an event of
their own, and are used when the same layer comes in the next computed step: a whole forward is queued behind them then.

Legend: h heads of this rank, H heads of all.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from wan_core.config import SparseOptions
from wan_core.ops.attention.sparse.routing import Rule
from wan_core.ops.attention.sparse.sampled import Rows, Samples, sample_rows
from wan_core.sampling.sparsity.bounds import Shares, StepErrors, head_errors, run_words
from wan_core.sampling.steps import Branch


class RankSums(Protocol):
    """Sums over the ranks that run a video together, the same numbers on all of them."""

    def over_forward(self, x: Tensor, both: bool) -> Tensor:
        """The sum of `x` over the ranks of this forward; both: and over those of the other branch, which run theirs."""
        ...

    @property
    def device(self) -> torch.device: ...
    def from_branch(self, x: Tensor, branch: Branch) -> Tensor:
        """`x` of the ranks that ran `branch` alone, on those of the other branch too."""
        ...


class Arriving(NamedTuple):
    """Sums of squares [2, H] on their way, the event after which they are there (None: they are), and where they come
    from."""

    sums: Tensor
    event: Any
    sent: Tensor


@dataclass
class StepRecord:
    """A computed step. shares, errors, worst: by layer. arriving: by layer and forward."""

    step: int
    shares: dict[int, float] = field(default_factory=dict)
    arriving: dict[int, dict[Hashable, Arriving]] = field(default_factory=dict)
    errors: dict[int, float] = field(default_factory=dict)
    worst: dict[int, float] = field(default_factory=dict)

    def settle(self, layer: int) -> float | None:
        """The error of a layer, when its sums have arrived; None: it read everything."""
        if layer in self.arriving:
            parts = self.arriving.pop(layer).values()
            for part in parts:
                if part.event is not None:
                    part.event.synchronize()
            sums = torch.stack([part.sums.double() for part in parts]).sum(0).tolist()
            self.errors[layer], self.worst[layer] = head_errors(*sums)
        return self.errors.get(layer)

    def finished(self, layers: Iterable[int]) -> StepErrors:
        """Waits for what has not arrived. Layers that did not ask, as in a dense step, read everything."""
        errors = tuple(self.settle(layer) for layer in layers)
        shares = tuple(self.shares.get(layer, 1.0) for layer in layers)
        return StepErrors(self.step, shares, errors, tuple(map(self.worst.get, layers)))


class Bounded:
    """One run: the computed steps of one expert at one size. Forwards of several GPUs in one process are threads.

    A step that is run again, after out of memory, has the shares of its first try."""

    def __init__(
        self, options: SparseOptions, blocks: int, ranks: RankSums | None = None, heads: tuple[slice, int] | None = None
    ) -> None:
        """ranks: those that run the video together. heads: those of this rank, and how many there are; None: it has
        all."""
        assert options.bound is not None
        self.options, self.ranks, self.heads, self.bound = options, ranks, heads, options.bound
        self.chosen = Shares(options.bound, blocks)
        self.steps: list[StepRecord] = []
        self.both = False  # both branches run in this step, each on ranks of its own
        self.placed: dict[tuple[int, int, torch.device], Rows] = {}  # of this step
        self.lock = threading.RLock()

    def begin(self, step: int, bound: float = 0.0, both: bool = False) -> None:
        """A computed step of the plan; several forwards of one step say it each. bound: that of the step; 0: that of
        the run. both: each of the two branches runs on ranks of its own."""
        with self.lock:
            self.both, self.chosen.bound = both, bound or self.bound
            if not self.steps or self.steps[-1].step != step:
                self.steps.append(StepRecord(step))
                self.placed.clear()

    @property
    def measures(self) -> bool:
        """Whether layers of this step may read less than everything."""
        return len(self.steps) > 1

    @property
    def samples(self) -> Samples:
        return Samples(self.rows, self.note)

    def rule(self, layer: int) -> Rule | None:
        """How many blocks a layer reads in this step; None: all."""
        with self.lock:
            now = self.steps[-1]
            if layer not in now.shares:
                error = self.steps[-2].settle(layer) if len(self.steps) > 1 else None
                now.shares[layer] = self.chosen.choose(layer, len(self.steps) - 1, error)
            share = now.shares[layer]
        return None if share == 1 else Rule(share)

    def rows(self, layer: int, tokens: int, device: torch.device) -> Rows:
        """The rows that are compared in this step."""
        with self.lock:
            key = layer, tokens, device
            if key not in self.placed:
                self.placed[key] = sample_rows(layer, self.steps[-1].step, tokens, device)
            return self.placed[key]

    def note(self, layer: int, forward: Hashable, sums: Tensor) -> None:
        """Sums of squares [2, h] of one forward."""
        if self.heads is not None:
            own, count = self.heads
            whole = sums.new_zeros(2, count)
            whole[:, own] = sums
            sums = whole
        self._arrive(layer, forward, sums if self.ranks is None else self.ranks.over_forward(sums, self.both))

    def share_branch(self, layers: int, branch: Branch, here: bool) -> None:
        """After a step in which only the ranks of `branch` ran blocks: those of the other branch choose as they did,
        and get what they measured. here: this rank is one of the former."""
        if self.ranks is None or self.heads is None:
            return
        chosen = [self.rule(layer) for layer in range(layers)]
        if not self.measures:
            return
        device, count = self.ranks.device, self.heads[1]
        arriving = self.steps[-1].arriving
        sums = torch.zeros(layers, 2, count, device=device)
        if here:
            for layer, parts in arriving.items():
                sums[layer] = torch.stack([part.sent for part in parts.values()]).sum(0)
        sums = self.ranks.from_branch(sums, branch)
        if not here:
            for layer, rule in enumerate(chosen):
                if rule is not None:
                    self._arrive(layer, branch, sums[layer])

    def _arrive(self, layer: int, forward: Hashable, sums: Tensor) -> None:
        """Sums [2, H] of one forward, of all ranks that run it."""
        sent, event = sums, None
        if sums.is_cuda:
            host = torch.empty(sums.shape, pin_memory=True)
            host.copy_(sums, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(sums.device))
            sums = host
        with self.lock:
            self.steps[-1].arriving.setdefault(layer, {})[forward] = Arriving(sums, event, sent)

    def newest(self) -> StepErrors | None:
        """The newest step whose errors were used, without waiting."""
        return self.steps[-2].finished(self.layers) if len(self.steps) > 2 else None

    def finished(self) -> list[StepErrors]:
        """All steps; waits for the device."""
        return [record.finished(self.layers) for record in self.steps if self.layers]

    @property
    def layers(self) -> list[int]:
        """Those that came."""
        return sorted(self.chosen.layers)


class StepCache(Protocol):
    """What decided in the run which steps of an expert were skipped."""

    def words(self) -> str:
        """A line for the report, or ""; waits for the device."""
        ...


class Measurements:
    """The runs of a whole video, or of a clip."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, Bounded]] = []
        self.caches: list[tuple[str, StepCache]] = []

    def add_to(self, attention: list[dict[str, Any]], notes: list[str]) -> None:
        """Add what every computed step read and measured, and a line about all of them; waits for the device."""
        steps = [{"expert": expert, **step.as_dict()} for expert, run in self.runs for step in run.finished()]
        attention += steps
        if steps:
            notes.append(run_words(steps, self.runs[0][1].bound))
        notes += [f"{expert}-noise expert: {words}" for expert, cache in self.caches if (words := cache.words())]

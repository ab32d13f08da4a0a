"""The models of one run in memory that the engine itself manages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from wan_core.execution.graphs import GraphedBlocks
from wan_core.execution.memory.owner import RunOwner
from wan_core.execution.report import Report
from wan_core.models.wan.model import WanModel
from wan_core.pipeline.load import Models
from wan_core.sampling.plan import Expert, LoraShare

Module = TypeVar("Module")


class OwnMemory(RunOwner):
    """Models under a `Residency`. With ranks, out of memory is an error: the others would wait for the step that this
    one repeats."""

    def __init__(self, models: Models, report: Report) -> None:
        super().__init__(report)
        self.models = models

    def fetch(self, name: str, use: Callable[[], Module]) -> Module:
        """A model ready on the device. Where models take turns, bringing it there is a phase of its own."""
        if self.models.residency.policy == "resident":
            return use()
        with self.report.phase(f"fetch {name}"):
            return use()

    def acquire(self, expert: Expert, loras: Sequence[LoraShare] = ()) -> WanModel:
        self.models.change_loras(expert, loras, self.report)
        return self.fetch(expert, lambda: self.models.expert(expert))

    def prefetch(self, expert: Expert, following: Expert, runs: int) -> None:
        self.models.prefetch(expert, following, runs)

    def make_room(self, name: str) -> str | None:
        residency = self.models.residency
        name = name if name in residency.models else "high"
        words = None if self.models.ranks is not None else residency.cheaper(name)
        if words is not None:
            for model in residency.models.values():
                if isinstance(model, WanModel):
                    model.runners.remove(GraphedBlocks)  # weights are elsewhere from now on
            residency.use(name)
        return words

"""Who holds the models of one run: the base of the engine's own memory and of ComfyUI's."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence

from wan_core.execution.report import Report
from wan_core.models.wan.model import WanModel
from wan_core.sampling.plan import Expert, LoraShare

log = logging.getLogger("WanCore")


class RunOwner(ABC):
    """An `Owner` (`wan_core.sampling.denoise`) that goes on by a cheaper plan where memory runs out, once in a run."""

    def __init__(self, report: Report) -> None:
        self.report, self.relieved = report, False

    @abstractmethod
    def acquire(self, expert: Expert, loras: Sequence[LoraShare] = ()) -> WanModel:
        """The expert, ready to run, its LoRAs at these shares of their strengths."""

    @abstractmethod
    def prefetch(self, expert: Expert, following: Expert, runs: int) -> None:
        """The next `runs` runs of the blocks of `expert` are the last before `following` is acquired."""

    @abstractmethod
    def make_room(self, name: str) -> str | None:
        """Go over to the next plan that takes less device memory, and bring the model `name` back. In words; None where
        there is none."""

    def relieve(self, name: str) -> bool:
        """Memory ran out with the model `name`: make room, and say so; False where there is none. Finished steps
        stay."""
        words = None if self.relieved else self.make_room(name)
        if words is None:
            return False
        self.relieved = True
        note = f"out of memory, going on with what takes less ({words}); nothing that was finished is lost"
        log.warning("%s", note)
        self.report.notes.append(note)
        return True

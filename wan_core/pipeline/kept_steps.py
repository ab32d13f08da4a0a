"""The latents of a run that is not finished, kept while it goes on, so that a run that was lost (a stopped rank, a
killed process, no power) goes on from them and makes the same video.

They are written at most every `SECONDS`, and only where the rest of the run needs nothing else of what was computed: at
the first step of an expert, and after any step that is followed by none with a cache. Finished ones of a clip stay
until the video is complete. A file's name has the start of a key, a hash of everything that decides the video, so a run
finds its own files only. A file that is not as it was written counts for nothing: its clip is made again.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from wan_core.checkpoint.save import load_latents, try_to_save_latents
from wan_core.config import UserError
from wan_core.parallel.conditioning import kept_of_all
from wan_core.parallel.mesh import RankMesh
from wan_core.sampling.plan import Plan
from wan_core.sampling.solvers import History
from wan_core.sampling.start import NEW

SECONDS = 30.0  # between two writes
ENDING = ".latents.safetensors"  # of kept steps and clips


class Reached(NamedTuple):
    """What a run goes on with. index: of the step that comes next. x: the noisy sample [B, C, T, Y, X] before it,
    normalised; after the last step, the finished latents, un-normalised. history: of the solver."""

    index: int
    x: Tensor
    history: History = NEW

    def pack(self) -> tuple[Tensor, Tensor]:
        """All tensors one after the other [n * B, C, T, Y, X], and four numbers that say which they are."""
        start = () if self.history.x is None else (self.history.x,)
        parts = [self.x, *self.history.x0, *start]
        return torch.cat(parts), torch.tensor([self.index, len(self.history.x0), len(start), self.history.order])

    @classmethod
    def unpack(cls, tensor: Tensor, numbers: list[int]) -> Reached:
        index, past, start, order = numbers
        x, *tensors = tensor.chunk(1 + past + start)
        return cls(index, x, History(tuple(tensors[:past]), tensors[past] if start else None, order))


class KeptLatents:
    """The file that holds the latents of one clip of an unfinished video: those of its steps so far, or finished ones.
    key: of everything that decides the video. warn: is told what a user should know. Only the first rank writes and
    reads."""

    def __init__(self, path: Path, key: str, warn: Callable[[str], None], clip: int = 0) -> None:
        self.path, self.key, self.warn, self.clip = path, key, warn, clip
        self.written = time.monotonic()

    def find(self, plan: Plan, shape: tuple[int, ...]) -> Reached | None:
        """Where an earlier run of the same video was, if the file is as it wrote it."""
        if not os.path.lexists(self.path):
            return None
        try:
            tensor, _, settings = load_latents(self.path)
            numbers = [int(number) for number in settings["numbers"]]
            index, past, start, _ = numbers
            mine = (settings["key"], settings["clip"]) == (self.key, self.clip)
            mine &= tuple(tensor.shape) == (shape[0] * (1 + past + start), *shape[1:])
            finished = numbers == [len(plan.steps), 0, 0, 0]
            if not mine or not (finished or can_begin_at(plan, index)):
                raise UserError(f"{self.path} has its name, and is another clip")
        except (UserError, OSError, KeyError, TypeError, ValueError) as fault:
            self.warn(f"clip {self.clip + 1} is made again: what an earlier run kept cannot be used: {fault}")
            return None
        return Reached.unpack(tensor, numbers)

    def keep(self, plan: Plan, reached: Reached, scales: bool) -> None:
        """After a step, where it is time. Where that is not possible, a warning says so, once. scales: see
        `can_begin_at`."""
        if time.monotonic() - self.written < SECONDS or not can_begin_at(plan, reached.index, scales):
            return
        self.written = time.monotonic() if self.write(reached) else float("inf")

    def write(self, reached: Reached) -> bool:
        """Whether that was possible; a warning says so where it was not."""
        tensor, numbers = reached.pack()
        with suppress(OSError):  # what is wrong with the folder, writing into it says
            self.path.parent.mkdir(exist_ok=True)
        settings = {"key": self.key, "clip": self.clip, "numbers": numbers.tolist()}
        failed = try_to_save_latents(self.path, tensor, 1, settings)
        if failed is not None:
            self.warn(failed)
        return failed is None


def can_begin_at(plan: Plan, index: int, scales: bool = False) -> bool:
    """Whether the steps from `index` on need nothing but the noisy sample and the solver's history. scales: the model
    takes some from one forward of a phase to the next."""
    if not 0 < index < len(plan.steps):
        return False
    phase = next(phase for phase in plan.phases if phase[0].index <= index <= phase[-1].index)
    return phase[0].index == index or not (
        scales or any(step.passes or (step.index >= index and step.skipped) for step in phase)
    )


def reached_of_all(
    kept: KeptLatents | None, ranks: RankMesh | None, plan: Plan, shape: tuple[int, ...], device: torch.device
) -> Reached | None:
    """Where an earlier run was, on every rank; kept: of the first rank, None on the others and where nothing is. Ranks
    that run different steps go on from none, but from a clip that is finished."""
    reached = None if kept is None else kept.find(plan, shape)
    if ranks is not None and ranks.time.size > 1 and reached is not None and reached.index < len(plan.steps):
        reached = None
    tensor, numbers = (None, None) if reached is None else reached.pack()
    numbers = kept_of_all(ranks, None if numbers is None else numbers.float(), (4,))
    if numbers is None:
        return None
    index, past, start, order = (int(number) for number in numbers.tolist())
    tensor = kept_of_all(ranks, tensor, (shape[0] * (1 + past + start), *shape[1:]))
    assert tensor is not None
    return Reached.unpack(tensor.to(device), [index, past, start, order])

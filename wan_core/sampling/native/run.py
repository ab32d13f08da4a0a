"""The state of one sampling run of a native model, and of one of its forwards.

A run begins with a sampler and ends with it, whatever happens. It travels in the options that ComfyUI hands to every
forward, so nothing is left when they are dropped.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from wan_core.config import SparseOptions
from wan_core.ops.attention.tiles import Grid
from wan_core.sampling.native.frames import FrameKeys
from wan_core.sampling.plan import WARNING
from wan_core.sampling.schedules import SchedulePart

# Keys in ComfyUI's transformer_options: a run, and a forward.
RUN, FORWARD = "wancore_run", "wancore_forward"
COMPARED = "self-attention, of the step that is compared"  # why calls are left


class NativeRun:
    """One sampling run. `step` counts the sampler's steps.

    Forwards of several GPUs run in threads: what they count goes through a lock.
    """

    def __init__(
        self,
        part: SchedulePart,
        sparsities: Sequence[float] = (),
        compare: bool = False,
        sparse: SparseOptions | None = None,
    ) -> None:
        """sparsities: of every step of the whole schedule; empty: dense. compare: the last step is ComfyUI's own, and
        its time is taken. sparse: how sparse steps select blocks."""
        self.part, self.sparsities, self.compare, self.sparse = part, sparsities, compare, sparse
        self.offers = False  # to compare the next one
        self.step = 0
        self.passed: dict[int, float] = {}  # when each of the last two steps ended, where they are compared
        self.sparse_steps: list[int] = []  # computed so far
        self.notes: list[str] = []
        self.began = 0.0  # when its first forward did; 0: none did
        self.seconds = 0.0  # from there to the end
        self.skipped = (0, 0)  # by a step cache: how many of how many forwards
        self.outer: Any = None  # the attention override of another node that is called in place of ours
        self._taken: Counter[str] = Counter()
        self._crossed: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def index(self) -> int:
        """The index of the current step in the whole schedule."""
        return self.part.index(self.step)

    @property
    def plain(self) -> bool:
        """Whether the current step is ComfyUI's own, to be compared."""
        return self.compare and self.step == self.part.steps - 1 > 0

    def pass_step(self, step: int, wait: Callable[[], None]) -> None:
        """A step of the sampler has ended. wait: for the device, where the time is taken."""
        self.step = step + 1
        if self.compare and step >= self.part.steps - 2:
            wait()
            self.passed[step] = time.perf_counter()

    @property
    def before(self) -> float:
        """Seconds of the step that was ComfyUI's own; 0 where none was computed."""
        last = self.part.steps - 1
        computed = COMPARED in self._left and {last - 1, last} <= self.passed.keys()
        return self.passed[last] - self.passed[last - 1] if computed else 0.0

    @property
    def sparsity(self) -> float:
        return self.sparsities[self.index] if self.sparsities else 0.0

    def note_sparse(self) -> None:
        with self._lock:
            if self.index not in self.sparse_steps:
                self.sparse_steps.append(self.index)

    def begin(self) -> None:
        self.began = self.began or time.perf_counter()

    def end(self) -> None:
        self.seconds = time.perf_counter() - self.began if self.began else 0.0

    @property
    def reads(self) -> list[float]:
        """The share of the keys that each sparse step read."""
        return [1 - self.sparsities[index] for index in self.sparse_steps]

    def take(self, by: str, crosses: bool = False) -> None:
        """Count a call of self-attention that `by` computes. crosses: of cross-attention."""
        with self._lock:
            (self._crossed if crosses else self._taken)[by] += 1

    def leave(self, why: str) -> None:
        """Count a call that ComfyUI computes, and `why`."""
        with self._lock:
            self._left[why] += 1

    def note(self, words: str) -> None:
        with self._lock:
            if words not in self.notes:
                self.notes.append(words)

    @property
    def taken(self) -> dict[str, int]:
        return dict(self._taken)

    @property
    def left(self) -> dict[str, int]:
        return dict(self._left)

    def words(self) -> str:
        """What was accelerated and what was not, in one line."""
        taken, crossed = (
            ", ".join(f"{count} by {by}" for by, count in calls.items()) for calls in (self._taken, self._crossed)
        )
        refused = ", ".join(f"{count} {why}" for why, count in self._left.items())
        notes = [note for note in self.notes if not note.startswith(WARNING)]
        words = [f"self-attention calls: {taken or 'none'}"]
        words += [f"cross-attention calls: {crossed}"] if crossed else []
        words += [f"left to ComfyUI: {refused}"] if refused else []
        return "; ".join([*words, *notes])


@dataclass
class NativeForward:
    """One forward of the transformer.

    grid: token frames, rows and columns of the latents. front: tokens before those of the grid. extra: whether it is
    known where other tokens are (behind the grid's). text: rows of text, as many keys as cross-attention to it has.
    by_frames: queries come frame by frame, to keys of the whole video and some behind, which alone change; frame_keys:
    those of the current layer. reached: calls of attention that came to the kernels of this engine.
    """

    run: NativeRun
    grid: Grid
    front: int = 0
    extra: bool = True
    text: int = 0
    by_frames: bool = False
    frame_keys: FrameKeys | None = None
    reached: int = 0

    @property
    def tokens(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @property
    def frame(self) -> int:
        """Tokens of a latent frame."""
        return self.grid[1] * self.grid[2]

    def crosses(self, queries: int, keys: int) -> bool:
        """Whether a call with so many is cross-attention. Animate-2 attends frame by frame, to the keys of all."""
        return keys != queries and not (keys >= self.tokens and queries == self.frame)

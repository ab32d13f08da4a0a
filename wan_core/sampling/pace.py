"""Between blocks: how far the host may be ahead of the GPU, and where a run can be interrupted.

Launching a forward takes the host less than a second, and running it takes a GPU 7 to 9 s (A14B at 720p). Without a
bound, all of a step would be queued when the user interrupts, and no one could stop it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCKS_AHEAD = 3  # of A14B at 720p in bf16 they take 0.75 s; enough that the GPU never waits for the host


class BlockChecks:
    """Where a run may be interrupted between two of its blocks. Both methods may raise."""

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        """check: called after every block."""
        self.check = check

    def after_block(self) -> None:
        """The work of a block has been launched."""
        self.check()

    def skip_steps(self, steps: int) -> None:
        """Other ranks have run so many steps before this one begins."""

    def before_exchange(self) -> None:
        """Ranks that split guidance are about to exchange velocities: this one runs no more blocks in this step."""


class Pace:
    """Called after every block. On a GPU, waits until at most `BLOCKS_AHEAD` blocks are queued or running."""

    def __init__(self, device: torch.device, check: Callable[[], None]) -> None:
        """check: called after every block, too; raises to interrupt."""
        self.check = check
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # Blocking: the host sleeps while it waits, and does not take a core from threads that read or copy.
        self.events = [torch.cuda.Event(blocking=True) for _ in range(BLOCKS_AHEAD if self.stream is not None else 0)]
        self.blocks = 0

    def __call__(self) -> None:
        if self.stream is not None:
            event = self.events[self.blocks % BLOCKS_AHEAD]
            if self.blocks >= BLOCKS_AHEAD:
                event.synchronize()  # recorded so many blocks ago
            event.record(self.stream)
            self.blocks += 1
        self.check()
